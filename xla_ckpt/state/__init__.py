"""Capture a program's objects as a state tree, and load them from one."""
