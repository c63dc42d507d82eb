"""The package's shape: no long module, no circle of imports, and a place in docs/code.md for every module."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "eagle3_ray"
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def module(name: str) -> str:
    return ".".join([PACKAGE.name, *Path(name).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module(name): path for name, path in FILES.items()}


def imported(path: Path) -> Iterator[str]:
    """The package's own modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in inner)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_module_is_longer_than_400_lines() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: {other for other in imported(path) if other in MODULES} - {name} for name, path in MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert len(order) == len(MODULES)
    assert order.index("eagle3_ray.records") < order.index("eagle3_ray.generate")


def test_the_order_to_read_in_names_every_module_once() -> None:
    named = re.findall(r"`([\w/]+\.py|[\w/]+/\*)`", (ROOT / "docs" / "code.md").read_text())
    modules = [name for name in FILES if not name.endswith("__init__.py")]
    groups = tuple(name.removesuffix("*") for name in named if name.endswith("/*"))
    singly = sorted(name for name in modules if not name.startswith(groups))
    assert sorted(name for name in named if not name.endswith("/*")) == singly
    assert all(any(name.startswith(group) for name in modules) for group in groups)
