"""The shape of the code: imports point downward, heavy packages are named in few files, public names resolve."""

import ast
import sys
from pathlib import Path

import pytest

import placewise

SOURCE = Path(placewise.__file__).parent
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

LAYERS = (  # each may import itself, its neighbours in the line and all lines above
    ("core",),
    ("formats",),
    ("machines",),
    ("graph_capture",),
    ("rewrite",),
    ("zoo",),
    ("models",),
    ("simulate",),
    ("bounds",),
    ("strategies",),
    ("run",),
    ("measure",),
    ("evaluate",),
    ("search",),
    ("training",),
    ("report",),
    ("experiments",),
    ("cli",),
    ("__init__", "__main__"),
)
DOORS = {  # methods of the nouns that lead a user upstairs, imported when they are called: Cluster.load, Plan.compile ...
    "core/cluster.py": ("formats", "machines"),
    "core/plan.py": ("formats", "run"),
    "graph_capture/capture.py": ("rewrite",),
}
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

PACKAGES = {  # others' packages, and where they may be named: the beginnings of paths
    "numpy": ("",),
    "tomli_w": ("formats/cluster_file.py",),
    "rich": ("cli/progress.py", "report/terminal_text.py"),
    "shtab": ("cli/",),
    "torch": (
        "graph_capture/", "rewrite/", "zoo/", "models.py", "machines/detect.py", "strategies/learned/", "run/", "measure/",
        "training/", "evaluate/measured", "experiments/bench/", "experiments/policy/", "experiments/training_setups/",
        "experiments/outside_models.py", "cli/tensorboard_curves.py",
    ),
    "transformers": ("graph_capture/", "zoo/", "experiments/training_setups/", "experiments/outside_models.py"),
    "timm": ("experiments/training_setups/",),
    "torchvision": ("experiments/training_setups/", "experiments/outside_models.py"),
    "diffusers": ("experiments/training_setups/",),
    "peft": ("experiments/training_setups/",),
    "matplotlib": ("experiments/search_figures.py", "experiments/policy/policy_figures.py"),
    "numba": ("simulate/",),
    "scipy": ("bounds/", "strategies/", "rewrite/recomputing.py", "experiments/papers/calibration.py"),
    "ortools": ("bounds/", "strategies/"),
    "gymnasium": ("strategies/learned/environment.py",),
    "tensorboard": ("cli/tensorboard_curves.py",),
    "ray": ("evaluate/",),
    "pymetis": ("strategies/partition.py",),
    "pyscotch": ("strategies/partition.py",),
    "playwright": ("experiments/bench/headless_browser.py",),
}  # fmt: skip


def imports(module: str) -> list[tuple[str, bool]]:
    """Returns the full names that a module imports, and whether at its top level (outside functions)."""
    tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [(name, id(node) not in inside) for name in names]
    return found


def unit(path: str) -> str:
    """Returns the package or module of the layers that a file belongs to: core for core/graph.py, models for models.py."""
    return path.partition("/")[0].removesuffix(".py")


def test_the_modules_are_found() -> None:
    assert {"core/graph.py", "models.py", "cli/__init__.py", "__init__.py"} <= set(MODULES)
    assert ("placewise.core.errors.GraphError", True) in imports("core/graph.py")
    assert ("torch", False) in imports("machines/detect.py")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    for name, _ in imports(module):
        package, _, rest = name.partition(".")
        if package == "placewise" and rest != "__version__":
            imported = rest.partition(".")[0]
            if imported not in DOORS.get(module, ()):
                assert RANK[imported] <= RANK[unit(module)], f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_others_packages_are_named_only_where_they_belong(module: str) -> None:
    for name, _ in imports(module):
        package = name.partition(".")[0]
        if package != "placewise" and package not in sys.stdlib_module_names:
            assert package in PACKAGES, f"{module} imports {package}"
            assert module.startswith(PACKAGES[package]), f"{module} imports {package}"


@pytest.mark.parametrize("module", [module for module in MODULES if unit(module) in ("core", "cli", "__init__", "report")])
def test_heavy_packages_are_loaded_only_when_used(module: str) -> None:
    top_level = {name.partition(".")[0] for name, at_top in imports(module) if at_top}
    assert top_level.isdisjoint(set(PACKAGES) - {"numpy"})
    if unit(module) == "core":
        assert top_level <= {*sys.stdlib_module_names, "numpy", "placewise"}


def test_no_public_name_has_two_homes() -> None:
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.parse((SOURCE / module).read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    shared = {name: found for name, found in homes.items() if len(found) > 1}
    assert shared == {}


def test_no_two_modules_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        if not module.endswith("__init__.py"):
            homes.setdefault(Path(module).stem, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_public_name_resolves() -> None:
    assert list(placewise.__all__) == sorted(placewise.__all__)
    for name in placewise.__all__:
        assert callable(getattr(placewise, name)), name
        assert name in dir(placewise)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        placewise.nothing  # noqa: B018
