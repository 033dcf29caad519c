"""Benchmarks that anyone can repeat: one file each."""
