"""Pure core: state trees, shardings, manifests, payload files and plans. No import of torch, os, threading or time."""
