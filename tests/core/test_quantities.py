"""Quantities as people read them."""

from placewise.core.quantities import at_most


def test_what_is_at_most_so_much_is_rounded_up() -> None:
    assert [at_most(share) for share in (0.022, 0.02201, 1e-9, 0.0, -0.1)] == ["2.2%", "2.3%", "0.0%", "0.0%", "0.0%"]
