"""Trainer integrations, one module for each trainer. Import them by name, so that you need only your own trainer.

docs/trainers.md describes how to use each one, and which state is restored exactly.
"""
