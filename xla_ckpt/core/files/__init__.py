"""Payload file formats: where the regions of arrays are in a file, and the bytes around them."""
