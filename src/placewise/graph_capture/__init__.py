"""A PyTorch training step becomes a graph and a program."""
