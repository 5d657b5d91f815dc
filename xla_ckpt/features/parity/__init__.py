"""Parity: survive damaged blocks and lost files."""
