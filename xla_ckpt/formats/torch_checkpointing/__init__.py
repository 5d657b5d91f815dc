"""Directories of Meta's torch_checkpointing: a file for each item and rank, most of them in torch.save format."""
