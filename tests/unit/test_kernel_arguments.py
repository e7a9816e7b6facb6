"""Kernel functions take few enough arguments to be read: strides, masks and what a kernel is compiled for come as tuples."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rooftile"
# two more than 40: the backward's kernels take the rests of far rows and sinks beside the tensors of every call
MOST = 42


def kernel_functions() -> dict[str, int]:
    """The number of arguments of every function that Triton or Gluon compiles."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(line) for line in node.decorator_list):
                found[f"{path.relative_to(PACKAGE)}:{node.name}"] = len(node.args.args) + len(node.args.kwonlyargs)
    return found


def test_no_kernel_function_has_too_many_arguments() -> None:
    counts = kernel_functions()
    assert "backends/triton/flash_fwd.py:_forward" in counts
    assert {name: count for name, count in counts.items() if count > MOST} == {}
