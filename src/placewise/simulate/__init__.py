"""What a placement costs: the definition in plain Python, and the same compiled."""
