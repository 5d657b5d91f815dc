"""Several processes, one verdict."""
