"""Compares strategies on one problem, on equal terms: the same number of evaluations, the same seeds.

The same loop runs every strategy and counts what is judged, so equal budgets are really equal. A strategy that finishes
early leaves the rest of its budget unused. On the command line:
`placewise compare MODEL --cluster C --budget 200`.
"""

import placewise as pw
from placewise.models import load_graph

STRATEGIES = ("gpu-only", "expert", "m-etf", "hill-climb", "genetic", "post")

graph = load_graph("inception-v3:batch=8")
machine = pw.Cluster.load("2xK80")

print(f"{'strategy':<12}{'best':>10}{'worst':>10}{'evaluations':>13}")
for strategy in STRATEGIES:
    plans = [pw.place(graph, machine, strategy=strategy, evaluations=200, seed=seed) for seed in range(2)]
    times = sorted(plan.step_seconds * 1e3 for plan in plans)
    print(f"{strategy:<12}{times[0]:>7.1f} ms{times[-1]:>7.1f} ms{plans[0].evaluations:>13,}")
print(f"no placement takes less than {plans[0].bound_seconds * 1e3:.1f} ms")
