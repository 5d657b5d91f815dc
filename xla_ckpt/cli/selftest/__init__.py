"""``xla-ckpt selftest``: check the guarantees of this library on your storage and devices."""
