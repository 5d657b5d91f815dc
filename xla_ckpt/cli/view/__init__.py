"""``xla-ckpt view``: web pages that show the checkpoints of a root directory."""
