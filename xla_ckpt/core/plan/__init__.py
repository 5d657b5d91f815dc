"""Plans of saves and restores: every decision, made before any I/O."""
