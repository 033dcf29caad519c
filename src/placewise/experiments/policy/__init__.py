"""How the weights of the graph policy are made: a corpus of problems, labels, and what a network learns."""
