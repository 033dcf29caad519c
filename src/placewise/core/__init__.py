"""The nouns: graph, cluster, costs, problem, and the contracts between those who propose and those who judge."""
