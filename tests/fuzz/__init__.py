"""Mutated files against every command that reads a file: `python -m tests.fuzz --minutes 5`."""
