"""Runs the notebooks on a CPU and stores what their cells print. With --check, it compares instead.

The cells of a notebook run in order in one namespace, as in Jupyter, but without its packages.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Returns the notebook with the outputs of a fresh run."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), scope)
            lines = printed.getvalue().splitlines(keepends=True)
            cell = cell | {"outputs": [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []}
        cells.append(cell)
    return notebook | {"cells": cells}


def written(notebook: dict[str, Any]) -> str:
    """Returns the file of a notebook, as Jupyter writes it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    for path in sorted(FOLDER.glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        with TemporaryDirectory() as folder, chdir(folder):
            due = written(run(json.loads(before)))
        if "--check" in sys.argv:
            if before != due:
                sys.exit(f"{path.name}: its outputs are out of date; run: make tables")
        else:
            path.write_text(due, encoding="utf-8")
            print(f"ran {path.name}")
