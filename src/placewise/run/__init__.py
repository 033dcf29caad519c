"""Runs a placed step on real devices."""
