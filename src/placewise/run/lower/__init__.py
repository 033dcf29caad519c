"""Turns a placement and an order into instructions, and finds which of them must wait for which."""
