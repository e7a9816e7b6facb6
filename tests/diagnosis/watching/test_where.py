"""Whose code a file is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import rooftile
from rooftile.diagnosis.watching.where import is_of_torch, is_own, user_line

TORCH, OURS = (Path(module.__file__).parent for module in (torch, rooftile))


def line_of(name: str) -> str:
    """Returns what `user_line` says of a frame of a file of that name."""
    found: list[str] = []
    exec(compile("found.append(user_line(sys._getframe(), 7, outwards=False))", name, "exec"),
         {"found": found, "user_line": user_line, "sys": sys})  # fmt: skip
    return found[0]


def test_a_library_whose_name_begins_like_anothers_is_not_that_one() -> None:
    vision, ours = TORCH.with_name("torchvision") / "ops.py", OURS.with_name("rooftile_lab") / "bench.py"
    assert line_of(str(vision)).endswith("torchvision/ops.py:7")
    assert not is_of_torch(str(vision))
    assert line_of(str(ours)).endswith("rooftile_lab/bench.py:7")
    assert is_own(str(ours))


def test_the_code_of_pytorch_of_this_package_and_of_python_has_no_line() -> None:
    for inside in (TORCH / "nn" / "modules" / "linear.py", OURS / "cli" / "app.py", Path(subprocess.__file__)):
        assert line_of(str(inside)) == ""
        assert not is_own(str(inside))
    assert is_of_torch(str(TORCH / "functional.py"))
