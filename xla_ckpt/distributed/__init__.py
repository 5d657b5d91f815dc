"""Ranks of a job: detection, messages, handshakes and consensus."""
