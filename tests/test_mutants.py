"""The planted bugs of scripts/mutants.py still apply; the script itself runs their tests."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load_mutants() -> Any:
    specification = importlib.util.spec_from_file_location("mutants", ROOT / "scripts/mutants.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


MODULE = load_mutants()


@pytest.mark.parametrize("number", range(len(MODULE.MUTANTS)))
def test_every_mutant_applies(number: int) -> None:
    mutant = MODULE.MUTANTS[number]
    compile(MODULE.applied(mutant, ROOT), mutant.file, "exec")
    assert all((ROOT / name).exists() for name in mutant.tests.split())
