"""Quantities as text that people read and write: bytes, seconds, percentages, counts."""

import math

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

BYTE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """Returns the number of bytes in "4096" or "12GiB"; a ValueError if it is neither, OverflowError if it is endless."""
    unit = next((unit for unit in BYTE_UNITS if text.endswith(unit)), None)
    return int(float(text.removesuffix(unit)) * BYTE_UNITS[unit]) if unit else int(text)


def format_bytes(number: float) -> str:
    """Returns a size with a binary unit: 10.9 GiB."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(number) >= size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f} B"


def format_seconds(number: float) -> str:
    """Returns a time in the unit that reads best: 12.3 ms."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(number) >= size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number * 1e9:.3g} ns" if number else "0 s"


def format_with_prefix(number: float) -> str:
    """Returns a number with a decimal prefix: 1.09 T."""
    for size, prefix in PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g}"


def format_count(number: int, noun: str) -> str:
    """Returns a number of things: 1 seed, 2,400 evaluations."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_percent(share: float) -> str:
    """Returns a share as a percentage with a tenth, or with three digits if it is huge: 2.3%, 1.2e+09%."""
    return f"{share:.1%}" if share < 1e4 else f"{100 * share:.3g}%"


def format_percent_rounded_up(share: float) -> str:
    """Returns a share as a percentage, rounded up to a tenth: "at most 2.3%" holds. A negative share gives 0.0%."""
    if share >= 1e4:
        return format_percent(share * 1.005)
    return f"{max(math.ceil(share * 1000 - 1e-5), 0) / 10:.1f}%"


def _three_digits(number: float) -> str:
    """Returns a number with three significant digits, or with all digits before the point if there are up to nine."""
    return f"{number:.0f}" if 999.5 <= abs(number) < 1e9 else f"{number:.3g}"
