"""The command line of the package: ``xla-ckpt``."""
