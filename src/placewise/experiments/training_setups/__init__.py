"""Training setups as people have them, trained by placewise and by a plain eager loop, and compared.

Each library has a file with its setups. They are built small and with random weights from the library's own configurations:
nothing is downloaded. A library is imported only when one of its setups is built.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from placewise.core.errors import InputError
from placewise.core.suggestions import did_you_mean

if TYPE_CHECKING:
    from placewise.experiments.training_setups.training_setup import Setup

LIBRARIES = ("torch", "transformers", "timm", "torchvision", "diffusers", "peft")

MODULES = ("torch_setups", "torch_loops", *(f"{library}_setups" for library in LIBRARIES[1:]))


@cache
def all_setups() -> "dict[str, Setup]":
    """Returns all setups by name, library by library."""
    found: dict[str, Setup] = {}
    for module in MODULES:
        for setup in import_module(f"{__name__}.{module}").SETUPS:
            assert setup.name not in found, setup.name
            found[setup.name] = setup
    return found


def find_setup(name: str) -> "Setup":
    """Returns the setup of a name."""
    return all_setups()[name]


def select_setups(names: tuple[str, ...]) -> "list[Setup]":
    """Returns the setups with these names or of these libraries, all without names; an InputError names a wrong one."""
    setups = all_setups()
    for name in names:
        if name not in setups and name not in LIBRARIES:
            raise InputError(f"there is no setup {name!r}: {did_you_mean(name, [*LIBRARIES, *setups])}")
    return [setup for setup in setups.values() if not names or setup.name in names or setup.library in names]


def third_of(library: str) -> "list[Setup]":
    """Returns every third setup of a library: those that the tests try."""
    return [setup for setup in all_setups().values() if setup.library == library][::3]
