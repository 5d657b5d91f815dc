"""Directories of torch.distributed.checkpoint (DCP): `.metadata`, and files of tensors that torch.save wrote."""
