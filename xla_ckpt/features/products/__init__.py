"""Exports and conversions made from committed checkpoints."""
