"""What bytes mean: the manifest, payload headers, zips of torch, digests. Pure."""
