"""A placement and an order become instructions, and the waits between them."""
