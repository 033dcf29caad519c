"""Placements by layer: experts, Accelerate's balanced map, pipelines, data parallelism."""
