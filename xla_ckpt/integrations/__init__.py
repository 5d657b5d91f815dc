"""Adapters for trainers: one module for each, imported by name, so that no trainer is needed for another one.

docs/trainers.md says how each is used, and what comes back exactly.
"""
