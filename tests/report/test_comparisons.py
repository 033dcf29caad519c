"""What plans are compared with."""

from chain_schedules import chain, two

from placewise.report.comparisons import Comparisons, comparisons_of


def test_plans_are_compared_with_one_device_and_the_expert() -> None:
    """Both ops on one device take 8 s; the expert has a module on each: 10 s. A byte of memory is too little for either."""
    assert comparisons_of(two().problem) == Comparisons(("gpu:0", 8.0), 10.0)
    assert comparisons_of(chain(["a.mm", "b.mm"], [3.0, 5.0], [0, 1], memory=1).problem) == Comparisons(None, None)
