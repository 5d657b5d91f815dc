"""A program's objects as a state tree, and back."""
