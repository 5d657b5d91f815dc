"""The manifest: the index of a checkpoint, and its JSON form."""
