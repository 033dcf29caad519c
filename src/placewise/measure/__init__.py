"""Measures real devices: ops, links, launches, contention, whole steps."""
