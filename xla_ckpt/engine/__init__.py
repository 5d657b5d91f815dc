"""Plans carried out: writing, reading, verifying, the save in flight."""
