"""Plans for saves and restores: all decisions are made before any I/O."""
