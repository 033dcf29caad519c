"""Placements by layer or micro-batch: experts, Accelerate's balanced map, pipelines, data parallelism."""
