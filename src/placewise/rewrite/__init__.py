"""Graph -> Graph, with the program: optional ops that repeat, or let a tensor wait elsewhere."""
