"""Golden histories: how every strategy's search begins on one captured step, kept in tests/golden/histories.json.

python tests/bless.py            writes them again, after a change that is meant to change them
python tests/bless.py --print    prints what searches of all strategies find, as one JSON object
"""

import dataclasses
import json
import sys
from typing import Any

import numpy as np
from captured import GOLDEN, captured_problem

from placewise.core.contracts import Evaluator
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies import STRATEGIES, make

HISTORIES = GOLDEN / "histories.json"
LENGTH = 5  # pairs of (evaluations, best step seconds) that are kept
EVALUATIONS = 200
FEWER_EVALUATIONS = {"colocrl": 48, "spotlight": 20, "hdp": 12}  # large networks, which take a second to learn from a batch
SEED = 7


def found(
    name: str, problem: Problem, evaluator: Evaluator, seed: int = SEED, budget: Budget | None = None
) -> dict[str, Any]:
    """Returns all results of a search that must not depend on the machine, as plain data."""
    budget = budget or Budget(evaluations=FEWER_EVALUATIONS.get(name, EVALUATIONS))
    outcome = search(problem, make(name), evaluator, budget=budget, seed=seed)
    fields = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome) if field.name != "seconds"}
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in fields.items()}
    data: dict[str, Any] = json.loads(json.dumps(plain))
    return data


def main(arguments: list[str]) -> None:
    """Writes the golden histories, or prints all findings."""
    problem = captured_problem()
    simulator = Simulator(problem)
    findings: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        try:
            findings[name] = found(name, problem, simulator)
        except Exception as reason:
            if arguments != ["--print"]:
                raise
            findings[name] = {"failed": repr(reason)}  # the others' findings are still worth printing
    if arguments == ["--print"]:
        print(json.dumps(findings))
        return
    lines = [f"  {json.dumps(name)}: {json.dumps(finding['history'][:LENGTH])}" for name, finding in findings.items()]
    HISTORIES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
