"""Quantities as people read them."""

from placewise.core.quantities import format_bytes, format_percent, format_percent_rounded_up, format_seconds


def test_what_is_at_most_so_much_is_rounded_up() -> None:
    assert [format_percent_rounded_up(share) for share in (0.022, 0.02201, 1e-9, 0.0, -0.1)] == [
        "2.2%",
        "2.3%",
        "0.0%",
        "0.0%",
        "0.0%",
    ]


def test_huge_quantities_stay_short() -> None:
    """What a file says may be absurd; a line in the terminal has no 290 digits."""
    assert [format_seconds(seconds) for seconds in (1234567.0, 999_999_999.0, 1e9, 3.269e286)] == [
        "1234567 s", "999999999 s", "1e+09 s", "3.27e+286 s"
    ]  # fmt: skip
    assert [format_percent(share) for share in (0.023, 12.5, 1e300)] == ["2.3%", "1250.0%", "1e+302%"]
    assert [format_percent_rounded_up(share) for share in (12.5, 1e300)] == ["1250.0%", "1e+302%"]
    assert format_bytes(2.0**90) == "1.13e+15 TiB"
