"""Prints the shape of the code in numbers: files, lines, names with two homes, and what a command passes through.

python scripts/shape.py
python scripts/shape.py place rnnlm --cluster 2xK80 --budget 5 --report page.html
"""

import ast
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "placewise"


def modules() -> dict[str, Path]:
    """Returns the file of every module by its full name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("placewise", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def public_homes() -> dict[str, list[str]]:
    """Returns the modules that define each public class or function."""
    homes = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return dict(homes)


def importers() -> dict[str, set[str]]:
    """Returns the modules that import each module."""
    known, found = modules(), defaultdict(set)
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found[name if name in known else node.module].add(module)
    return {name: users for name, users in found.items() if name in known}


class Walk:
    """Counts the modules, the calls between modules and the depth of the stack while a command runs."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.edges: set[tuple[str, str]] = set()
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Takes one event of sys.setprofile in."""
        if event != "call" or not _is_ours(frame):
            return
        module, callers = _module(frame), []
        outer = frame.f_back
        while outer is not None:
            if _is_ours(outer):
                callers.append(_module(outer))
            outer = outer.f_back
        self.modules.add(module)
        self.depth = max(self.depth, len(callers) + 1)
        if callers and callers[0] != module:
            self.edges.add((callers[0], module))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_ours(frame: FrameType) -> bool:
    return _module(frame).startswith("placewise") and frame.f_code.co_name != "<module>"


def walk(arguments: list[str]) -> Walk:
    """Runs a command and returns what it passed through."""
    from placewise.cli import main

    found = Walk()
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        main(arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def main() -> None:
    """Prints the figures; with arguments also those of that command."""
    files = modules().values()
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    single = [m for m, users in importers().items() if len(users) == 1 and modules()[m].name != "__init__.py"]
    two = {name: homes for name, homes in public_homes().items() if len(homes) > 1}
    print(f"{len(files)} files, {lines:,} lines, {len(single)} modules with one importer, {len(two)} names with two homes")
    for name, homes in two.items():
        print(f"  {name}: {', '.join(homes)}")
    if sys.argv[1:]:
        found = walk(sys.argv[1:])
        print(f"{len(found.modules)} modules, {len(found.edges)} edges between them, depth {found.depth}")


if __name__ == "__main__":
    main()
