"""Quantities as people read them: bytes, seconds, percentages, counts."""

import math


def at_most(share: float) -> str:
    """Returns a share in percent, rounded up to a tenth."""
    return f"{max(math.ceil(share * 1000 - 1e-5), 0) / 10:.1f}%"


def counted(number: int, what: str) -> str:
    """Returns a number of things: 1 seed, 2,400 evaluations."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """Returns a number with a decimal prefix: 1.09 T."""
    for size, prefix in PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g}"


def nbytes(number: float) -> str:
    """Returns a size with a binary unit: 10.9 GiB."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(number) >= size:
            return f"{_three(number / size)} {unit}"
    return f"{number:.0f} B"


def seconds(number: float) -> str:
    """Returns a time in the unit that reads best: 12.3 ms."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(number) >= size:
            return f"{_three(number / size)} {unit}"
    return f"{number * 1e9:.3g} ns" if number else "0 s"


def _three(number: float) -> str:
    """Returns a number with three digits, or with more where it has more before the point."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
