"""Checkpoint formats on disk: the native format, and the formats of other libraries.

`base` defines the `Layout` class that a format derives from, `registry` the list of formats, `tags` finds and opens
checkpoints of any format. Each folder contains the format of one library.
"""
