"""torch.distributed.checkpoint (DCP) directories: `.metadata`, and files of tensors in torch.save format."""
