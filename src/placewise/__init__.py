"""Finds where each operation of a neural network's training step should run."""
