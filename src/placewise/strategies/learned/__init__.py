"""Strategies that learn a distribution over placements from the evaluations of its samples."""
