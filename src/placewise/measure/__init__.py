"""Measures this machine: ops, links, launches, contention and whole steps."""
