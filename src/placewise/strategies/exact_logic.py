"""Yes and no in a constraint program: literals that may be constants, and what is said of several of them."""

from dataclasses import dataclass
from typing import Any

from placewise.core.errors import StrategyError

Literal = Any  # a Boolean variable of ortools, its negation, or a constant: 0 or 1


@dataclass(frozen=True, eq=False)
class Logic:
    """Adds to a solver's model; literals that are known are left out of what it gets."""

    model: Any

    def imply(self, literals: list[Literal], constraint: Any) -> None:
        """Adds a constraint that holds where all literals do."""
        literals = [one for one in literals if not (isinstance(one, int) and one == 1)]
        if any(isinstance(one, int) for one in literals):
            return
        self.model.add(constraint).only_enforce_if(literals)

    def clause(self, literals: list[Literal]) -> None:
        """Adds that one of the literals holds."""
        if not any(isinstance(one, int) and one == 1 for one in literals):
            self.model.add_bool_or([one for one in literals if not isinstance(one, int)])

    def all_of(self, literals: list[Literal]) -> Literal:
        """Returns a literal that is the conjunction."""
        literals = [one for one in literals if not (isinstance(one, int) and one == 1)]
        if any(isinstance(one, int) for one in literals):
            return 0
        if len(literals) < 2:
            return literals[0] if literals else 1
        whole = self.model.new_bool_var("and")
        self.model.add_bool_and(literals).only_enforce_if(whole)
        self.model.add_bool_or([*(one.negated() for one in literals), whole])
        return whole

    def any_of(self, literals: list[Literal]) -> Literal:
        """Returns a literal that is the disjunction."""
        return negated(self.all_of([negated(one) for one in literals]))


def negated(literal: Literal) -> Literal:
    """Returns the opposite."""
    return 1 - literal if isinstance(literal, int) else literal.negated()


def import_solver() -> Any:
    """Returns ortools' CP-SAT."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise StrategyError("strategy 'exact' needs ortools: pip install placewise[exact]") from None
    return cp_model
