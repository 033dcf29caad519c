"""Instructions become straight-line Python source, one function for each launching thread."""
