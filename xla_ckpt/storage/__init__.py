"""Bytes in files."""
