"""Snapshots of a state in host memory: capture, staging buffers and progress."""
