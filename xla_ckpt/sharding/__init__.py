"""Where the elements of global arrays lie: boxes, meshes, shardings, owners. Pure."""
