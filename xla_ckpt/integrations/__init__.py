"""Integrations with trainers: one module for each, imported by name, so that you need only your own trainer.

docs/trainers.md describes how to use each, and which state is restored exactly.
"""
