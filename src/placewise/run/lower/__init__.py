"""A placement and an order become instructions, and it is worked out which of them must wait for which."""
