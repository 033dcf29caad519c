"""Problem to plan: the planner, the driver, budgets, and the record of runs."""
