"""What bytes mean: the manifest, the payload header, digests. Pure."""
