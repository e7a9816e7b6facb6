"""The notebooks run on a CPU and print what they show."""

from __future__ import annotations

import json

import pytest

from scripts.run_notebooks import run, written
from tests.docs.pages import ROOT, run_script

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_two() -> None:
    assert NOTEBOOKS == ["attention_in_ten_minutes.ipynb", "serve_a_tiny_model.ipynb"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_it_shows(name: str, tmp_path) -> None:
    path = ROOT / "notebooks" / name
    script = tmp_path / "again.py"
    script.write_text(
        "import json\nfrom pathlib import Path\nfrom scripts.run_notebooks import run, written\n"
        f"print(written(run(json.loads(Path({str(path)!r}).read_text(encoding='utf-8')))), end='')\n",
        encoding="utf-8",
    )
    code, output, errors = run_script(script, tmp_path)
    assert code == 0, errors
    assert output == path.read_text(encoding="utf-8")


def test_an_output_is_replaced_by_what_the_cells_print() -> None:
    cells = [
        {"cell_type": "code", "id": "a", "source": ["x = 2\n", "print(x)"], "outputs": ["old"]},
        {"cell_type": "markdown", "id": "b", "source": ["print(3)"]},
        {"cell_type": "code", "id": "c", "source": ["x += 1"], "outputs": ["old"]},
        {"cell_type": "code", "id": "d", "source": ["print(x)\n", "import rooftile\n", "rooftile.CAUSAL"], "outputs": []},
    ]
    found = run({"cells": cells, "nbformat": 4})
    assert found["cells"][0]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["2\n"]}]
    assert found["cells"][2]["outputs"] == []
    said, shown = found["cells"][3]["outputs"]
    assert said["text"] == ["3\n"]
    # what a cell ends with, as a line and as a picture
    assert shown["data"]["text/plain"] == ["CAUSAL"]
    assert "<svg" in "".join(shown["data"]["text/html"])
    assert json.loads(written(found)) == found
