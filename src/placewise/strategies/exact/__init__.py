"""Optimal placements of small steps, by constraint programming."""
