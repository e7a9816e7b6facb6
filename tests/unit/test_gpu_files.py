"""The files of tests/gpu, which `make test` leaves out: they can be imported here, and every test in them needs a GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

NAMES = sorted(path.stem for path in (Path(__file__).parents[1] / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_can_be_imported_and_has_the_mark(name: str) -> None:
    marks = import_module(f"tests.gpu.{name}").pytestmark
    assert "gpu" in {mark.name for mark in (marks if isinstance(marks, list) else [marks])}
