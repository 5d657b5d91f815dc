"""The forms that checkpoints have on disk."""
