"""Payload file formats: the offsets of array regions in a file, and the framing bytes around them."""
