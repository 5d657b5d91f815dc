"""Which job this process belongs to, and how its ranks talk."""
