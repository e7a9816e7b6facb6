"""Runs the notebooks on a CPU and stores what their cells print and show. With --check, it compares instead.

The cells of a notebook run in order in one namespace, as in Jupyter, but without its packages.
"""

from __future__ import annotations

import ast
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
                last = ran("".join(cell["source"]), f"cell {cell['id']}", scope)
            lines = printed.getvalue().splitlines(keepends=True)
            outputs = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
            cell = cell | {"outputs": outputs + ([shown(last)] if last is not None else [])}
        cells.append(cell)
    return notebook | {"cells": cells}


def ran(source: str, name: str, scope: dict[str, Any]) -> Any:
    """Runs a cell, and returns the value of its last line if that is an expression."""
    parsed = ast.parse(source, name)
    last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
    exec(compile(parsed, name, "exec"), scope)
    return eval(compile(ast.Expression(last.value), name, "eval"), scope) if isinstance(last, ast.Expr) else None


def shown(value: Any) -> dict[str, Any]:
    """Returns the output of a cell that ends with a value, as Jupyter writes it."""
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data = {"text/html": value._repr_html_().splitlines(keepends=True)} | data
    return {"output_type": "execute_result", "data": data, "execution_count": None, "metadata": {}}


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
