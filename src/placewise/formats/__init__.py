"""The files that placewise reads and writes. Reading one never executes code."""
