"""The figures of the docs: benchmarks, and the papers' tables."""
