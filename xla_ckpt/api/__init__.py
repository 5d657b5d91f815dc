"""The public functions: where a program's objects meet the engine."""
