"""Training loops: a step that is captured, placed and compiled for each shape of batch that it gets."""
