"""Where elements are: boxes, grids, meshes, owners, byte ranges. Pure."""
