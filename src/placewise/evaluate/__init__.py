"""Evaluators around an evaluator: cached, on processes, on Ray. None of them changes a result."""
