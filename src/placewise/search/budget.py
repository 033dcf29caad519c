"""What a search may spend."""

from dataclasses import dataclass

from placewise.core.errors import InputError, StrategyError


@dataclass(frozen=True)
class Budget:
    """What a search may spend; it ends at the first limit, or when the strategy has nothing more to propose."""

    evaluations: int | None = None
    seconds: float | None = None
    patience: int | None = None  # evaluations without a better placement
    target_gap: float | None = None  # (found / bound - 1) that is good enough, where a bound is known

    def __post_init__(self) -> None:
        for name, least in (("evaluations", 1), ("seconds", 0), ("patience", 1), ("target_gap", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise StrategyError(f"budget: {name} must be at least {least}, it is {value}")


DEFAULT_SECONDS = 10.0  # of auto, whose evaluations are few: it judges most placements by its own model

CLOSED = 1e-6  # a gap that nobody would look for

DEFAULT_EVALUATIONS = 2400  # of all others: Post's

DEFAULT_MEASUREMENTS = 60  # of every strategy, where placements are measured


def budget_of(
    strategy: str,
    evaluations: int | None,
    seconds: float | None,
    target_gap: float | None = None,
    *,
    is_measured: bool = False,
) -> Budget:
    """Returns a budget; without evaluations and seconds it is 10 seconds for auto, 2,400 evaluations for all others.

    Where placements are measured it is 60 measurements. auto ends when its gap is closed, too.
    """
    if is_measured:
        if target_gap is not None:
            raise InputError("target-gap: is to a bound of simulated times, measured ones have none")
        return Budget(DEFAULT_MEASUREMENTS if evaluations is None and seconds is None else evaluations, seconds)
    if evaluations is None and seconds is None:
        evaluations, seconds = (None, DEFAULT_SECONDS) if strategy == "auto" else (DEFAULT_EVALUATIONS, None)
    if strategy == "auto" and target_gap is None:
        target_gap = CLOSED
    return Budget(evaluations, seconds, target_gap=target_gap)
