"""Quantities as people read them."""

from placewise.core.quantities import format_percent_rounded_up


def test_what_is_at_most_so_much_is_rounded_up() -> None:
    assert [format_percent_rounded_up(share) for share in (0.022, 0.02201, 1e-9, 0.0, -0.1)] == [
        "2.2%",
        "2.3%",
        "0.0%",
        "0.0%",
        "0.0%",
    ]
