"""Instructions become straight-line Python source: one function for each thread that launches."""
