"""The index of a tag, and the digests of its bytes. Pure."""
