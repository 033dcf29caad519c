"""The compiled training step that a user calls."""
