"""The structure of the package: imports go down, no module is named utils, and importing rooftile stays cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rooftile

PACKAGE = Path(rooftile.__file__).parent

# the first part of a module's name below rooftile, and the floor it lives on. A line of its own: rooms that are coming
FLOORS = {
    # every room may raise an error, and draw what a notebook shows
    "errors": 0, "drawing": 1,
    "runtime": 2,
    "hardware": 3, "numerics": 3,
    "fused": 4,
    "recurrent": 5, "weights": 5, "kvcache": 5, "optim": 5,
    "exact": 6, "moe": 6,
    "cost": 7, "integrations": 7,
    "approximate": 8, "parallel": 8, "recommend": 8,
    # the layers of all of them
    "nn": 9,
    "qat": 10, "models": 10,
    "engine": 11,
    "server": 12, "diagnosis": 12,
    # it takes counts, roofs and fusions from the diagnosis
    "planning": 13,
    "cli": 14,
    "__main__": 15,
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place(module: str) -> str:
    """Returns the room of a module: `rooftile.exact.backends.tiled.forward` is in `backends`."""
    return module.split(".")[1]


def imports(path: Path) -> list[str]:
    """Yields the full name of every rooftile module that a file imports, at its top, inside functions or for types."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import, line {node.lineno}"
            found += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            found += [name.name if "." in name.name else f"{name.name}.attention" for name in node.names]
    return [module for module in found if module.startswith("rooftile.")]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_go_down(path: Path) -> None:
    own = place(name_of(path))
    assert own in FLOORS, f"{path.name} lives on no floor; give `{own}` one in design and here"
    for module in imports(path):
        other = place(module)
        # an import from `rooftile` itself is the public API
        floor = FLOORS.get(other, FLOORS["exact"])
        lower = other == own or floor < FLOORS[own]
        assert lower, f"{name_of(path)} (floor {FLOORS[own]}) imports {module} (floor {floor})"


def test_models_and_training_do_not_know_each_other() -> None:
    """A model is read and served without the code that trains it, and trained without the code that serves it."""
    pairs = [(name_of(path), module) for path in modules() for module in imports(path)]
    between = [(own, other) for own, other in pairs if {place(own), place(other)} == {"models", "qat"}]
    assert {"models", "qat"} <= {place(own) for own, _ in pairs}
    assert not between


def graph() -> dict[str, set[str]]:
    """The modules that each module imports, at its top, inside functions or for types. A package may import its own parts."""
    named = {name_of(path): path for path in modules()}
    found: dict[str, set[str]] = {}
    for name, path in named.items():
        # `from package import x` imports a module if there is one of that name, and the package if x is something in it
        targets = {module if module in named else module.rpartition(".")[0] for module in imports(path)}
        found[name] = {module for module in targets & named.keys() if not module.startswith(f"{name}.")} - {name}
    return found


def test_no_import_cycle() -> None:
    edges = graph()
    assert "rooftile.exact.spec" in edges["rooftile.exact.validate"]
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' <- '.join(error.args[1])}")


def test_no_backend_imports_another() -> None:
    for path in (PACKAGE / "backends").glob("*/**/*.py"):
        own = path.relative_to(PACKAGE / "backends").parts[0]
        for module in imports(path):
            # what gathers pages, and what kernels have in common belongs to no backend
            shared = tuple(f"rooftile.exact.backends.{name}" for name in ("paged_by_gather", "device."))
            if place(module) == "backends" and not module.startswith(shared):
                assert module.split(".")[2] == own, f"{path} imports {module}"


def test_the_package_imports_nothing_of_the_lab() -> None:
    lab = re.compile(r"^\s*(from|import) rooftile_lab|import_module\(.rooftile_lab", re.MULTILINE)
    assert lab.search("    from rooftile_lab.bench import run")
    assert [path for path in PACKAGE.rglob("*.py") if lab.search(path.read_text())] == []


def test_no_drawer_for_everything() -> None:
    drawers = {"utils", "common", "helpers", "util", "misc"}
    assert [path for path in PACKAGE.rglob("*") if path.stem in drawers] == []


def test_importing_rooftile_brings_no_kernel_language_and_no_optional_package() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import rooftile; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *brought, dynamo = done.stdout.split()
    heavy = {"triton", "transformers", "matplotlib", "jinja2", "typer", "rich", "fastapi", "sympy", "hypothesis"}
    assert "rooftile" in brought
    assert heavy.isdisjoint(brought)
    assert dynamo == "False"


def test_no_submodule_takes_the_name_of_what_its_package_defines() -> None:
    """A submodule becomes an attribute of its package on import, and would replace a function of the same name."""
    for path in PACKAGE.rglob("__init__.py"):
        submodules = {p.stem for p in path.parent.glob("*.py")} | {p.name for p in path.parent.iterdir() if p.is_dir()}
        tree = ast.parse(path.read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert submodules & defined == set(), path
