"""``xla-ckpt view``: what a root directory holds, as pages that a browser shows."""
