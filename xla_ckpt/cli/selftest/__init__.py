"""``xla-ckpt selftest``: the promises of this library, seen on the storage and the devices of its user."""
