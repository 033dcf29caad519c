"""Budgets: when a search ends, and the defaults."""

from dataclasses import dataclass, replace

from placewise.core.errors import InputError, StrategyError


@dataclass(frozen=True)
class Budget:
    """Limits of a search; it ends at the first one reached, or when the strategy has nothing more to propose."""

    evaluations: int | None = None
    seconds: float | None = None
    patience: int | None = None  # evaluations without a better placement
    target_gap: float | None = None  # a gap (found / bound - 1) that is good enough, if there is a bound

    def __post_init__(self) -> None:
        for name, least in (("evaluations", 1), ("seconds", 0), ("patience", 1), ("target_gap", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise StrategyError(f"budget: {name} must be at least {least}, got {value}")

    def without(self, seconds: float) -> "Budget":
        """Returns what is left of the budget after so many seconds; at least a tenth of its seconds."""
        return self if self.seconds is None else replace(self, seconds=max(self.seconds - seconds, self.seconds / 10))


DEFAULT_SECONDS = 10.0  # for auto, which needs few evaluations: it judges most placements with its own simulator

DEFAULT_EVALUATIONS = 2400  # for all other strategies, as in the Post paper

DEFAULT_MEASUREMENTS = 60  # for every strategy that measures placements

CLOSED = 1e-6  # a gap this small counts as closed


def budget_of(
    strategy: str,
    evaluations: int | None,
    seconds: float | None,
    target_gap: float | None = None,
    *,
    is_measured: bool = False,
) -> Budget:
    """Returns a budget. Without evaluations and seconds, it is 10 seconds for auto and 2,400 evaluations for all others.

    If placements are measured, it is 60 measurements. auto also ends when its gap is closed.
    """
    if is_measured:
        if target_gap is not None:
            raise InputError(
                "a target gap can't be used when placements are measured: the bound holds only for simulated times"
            )
        return Budget(DEFAULT_MEASUREMENTS if evaluations is None and seconds is None else evaluations, seconds)
    if evaluations is None and seconds is None:
        evaluations, seconds = (None, DEFAULT_SECONDS) if strategy == "auto" else (DEFAULT_EVALUATIONS, None)
    if strategy == "auto" and target_gap is None:
        target_gap = CLOSED
    return Budget(evaluations, seconds, target_gap=target_gap)
