"""Checkpoint roots: tags, commits, leases, retention and cleanup."""
