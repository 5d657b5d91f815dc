"""Parity: recover from damaged blocks and lost files."""
