"""Checkpoint formats on disk: our own, and those of other libraries.

`base` has the `Layout` class that a format derives from, `registry` the list of formats, `tags` finds and opens
checkpoints of any format. Each folder is one library's format.
"""
