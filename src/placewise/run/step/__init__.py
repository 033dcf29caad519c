"""The training step that a user calls."""
