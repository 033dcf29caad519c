"""The nouns: graph, cluster, problem, plan, profile, and the contract between strategies and evaluators."""
