"""Pure core: state trees, shardings, manifests, payload files and plans. Imports no torch, os, threading or time."""
