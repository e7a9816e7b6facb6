"""The package grows only where budget.toml says so: rooms, crowded folders, options, arguments and ways between rooms."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from tests.unit.budget import BUDGET, PACKAGE, Budget, as_toml, growth, measured, moves

ADVICE = "write it again with `python -m tests.unit.budget` if the growth is worth it"


@pytest.fixture(scope="module")
def budget() -> Budget:
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found() -> Budget:
    return measured()


def test_nothing_grew(budget: Budget, found: Budget) -> None:
    assert growth(budget, found) == [], ADVICE


def test_calls_move_between_rooms_no_more_often(budget: Budget) -> None:
    found = moves()
    assert found.keys() == budget["moves"].keys()
    assert growth(budget, {"moves": found}) == [], ADVICE


def test_the_budget_has_no_room_to_spare(budget: Budget, found: Budget) -> None:
    """A room that became smaller has a smaller budget, so that it cannot grow back unseen; its lines may be 5 % below."""
    spare = {
        f"{section}, {name}: the budget has {size}; the package {sizes.get(name, 0)}"
        for section, sizes in found.items()
        for name, size in budget[section].items()
        if sizes.get(name, 0) < (0.95 * size if section in ("lines", "lab") else size)
    }
    assert spare == set(), "write it again with `python -m tests.unit.budget`"


def test_the_file_is_as_it_is_written(budget: Budget) -> None:
    assert as_toml(budget) == BUDGET.read_text(encoding="utf-8")


def test_a_growth_is_seen(budget: Budget, tmp_path: Path) -> None:
    copy = tmp_path / "rooftile"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    grown = {
        "kvcache/pool.py": "\n" * 200,
        "room/__init__.py": "x = 1\n",
        "qat/extra.py": "# the sum is that\n    # of the row\n" * 40,
        "diagnosis/extra.py": "",
        "diagnosis/more.py": "",
        "optim/extra.py": "def f(softcap): ...\n@triton.jit\ndef g(dropout): ...\n",
        "sparsity/extra.py": f"@triton.jit\ndef f({', '.join(f'a{n}' for n in range(60))}): ...\n",
    }
    for file, text in grown.items():
        path = copy / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as opened:
            opened.write(text)
    seen = {line.partition(":")[0] for line in growth(budget, measured(copy))}
    assert seen == {
        "lines, kvcache", "lines, room", "lines, optim", "lines, sparsity", "lines, qat", "entries, root", "folders, diagnosis",
        "options, softcap", "phrases, that of", "kernels, arguments",
    }  # fmt: skip
