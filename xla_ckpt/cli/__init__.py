"""Command-line interface: ``xla-ckpt``."""
