"""Captures a PyTorch training step as a graph and a program."""
