"""A third of the table: every third setup of each library trains as the docs page says, or better."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from placewise.experiments.training_setups import LIBRARIES, all_setups, select_setups, third_of
from placewise.experiments.training_setups.agreement import EQUAL_BITS, EQUAL_TO_ROUNDING, REFUSED
from placewise.experiments.training_setups.trials import try_setup

PAGE = Path(__file__).parents[3] / "docs" / "results" / "setups.md"
RESULTS = (EQUAL_BITS, EQUAL_TO_ROUNDING, REFUSED)


def page_results() -> dict[str, str]:
    """Returns the result of each setup on the docs page."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row[0]: row[5].partition(",")[0].strip() for row in rows if row[0] != "setup"}


def test_the_page_has_exactly_the_setups_of_the_table() -> None:
    assert list(page_results()) == list(all_setups()), "placewise bench setups -o docs/results/setups.md writes it"


def test_names_select_setups_and_libraries() -> None:
    assert [setup.name for setup in select_setups(("vae", "gpt"))] == ["gpt", "vae"]
    assert {setup.library for setup in select_setups(("timm", "peft"))} == {"timm", "peft"}
    assert len(select_setups(())) == len(all_setups()) >= 80


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_third_trains_as_the_page_says(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    expected = page_results()
    found = {setup.name: try_setup(setup, finds_kernels=False) for setup in third_of(library)}
    assert len(found) >= len(select_setups((library,))) / 3
    bad = {name: one for name, one in found.items() if one.result not in RESULTS}
    assert not bad
    refused = {name: one.why for name, one in found.items() if one.result == REFUSED and expected[name] != REFUSED}
    assert not refused
