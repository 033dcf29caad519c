"""The default strategy: a portfolio of starts, then annealed walks in the simulator."""
