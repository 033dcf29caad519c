"""What a placement costs: the meaning of a placement, exact and fast."""
