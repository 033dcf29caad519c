"""Strategies that learn a distribution over placements from evaluations of its samples."""
