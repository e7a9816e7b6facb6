"""The line of the user's code that a frame belongs to."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

import rooftile

# frames around this file's called the step for a diagnosis: their lines say nothing about its operators
RUNNER = str(Path(__file__).parents[1] / "programs" / "diagnose_call.py")
# code whose lines are of no interest: PyTorch, this package and Python itself. Torchvision's folder begins like PyTorch's
OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (*(Path(module.__file__ or "").parent for module in (torch, rooftile)), sysconfig.get_path("stdlib"))
)


def user_line(frame: FrameType | None, line: int | None = None, *, outwards: bool = True) -> str:
    """The innermost frame that is the user's, as "file.py:12"; "" if the step has no such frame, as a module of torch.nn.

    A library that is neither PyTorch's nor this one counts as the user's, such as Transformers: its line says more than the
    line that calls the whole model.

    line: of this frame; None: the one that it is at. outwards: also ask the frames that called it.
    """
    while frame is not None and frame.f_code.co_filename != RUNNER:
        # Inductor's generated code lies anywhere, and is one of PyTorch's modules
        if _is_user(frame.f_code.co_filename) and not frame.f_globals.get("__name__", "").startswith("torch."):
            return f"{_shown(frame.f_code.co_filename)}:{line or frame.f_lineno}"
        line, frame = None, frame.f_back if outwards else None
    return ""


@cache
def _is_user(name: str) -> bool:
    # site-packages lie inside the folder of the standard library
    return ("site-packages" in name and not name.startswith(OURS[:2])) or not name.startswith(("<", *OURS))


@cache
def is_of_torch(name: str) -> bool:
    """Whether a file is PyTorch's, or this package's."""
    return name.startswith(OURS[:2])


@cache
def is_own(name: str) -> bool:
    """Whether a file is a script's own: of no library, and not Python's."""
    return _is_user(name) and "site-packages" not in name


@cache
def _shown(name: str) -> str:
    path = Path(name)
    if "site-packages" in path.parts:
        return str(Path(*path.parts[path.parts.index("site-packages") + 1 :]))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
