"""Numbers as people read them."""

import math


def at_most(share: float) -> str:
    """Returns a share in percent, rounded up to a tenth."""
    return f"{max(math.ceil(share * 1000 - 1e-5), 0) / 10:.1f}%"


def counted(number: int, what: str) -> str:
    """Returns a number of things: 1 seed, 2,400 evaluations."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
