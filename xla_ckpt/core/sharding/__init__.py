"""Shardings: boxes, meshes, and how local tensors map to global arrays."""
