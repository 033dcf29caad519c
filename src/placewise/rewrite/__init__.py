"""Graph -> Graph, with the program: fused ops; optional ops that repeat, or let a tensor wait elsewhere."""
