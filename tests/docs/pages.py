"""The documentation pages and their contents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def fences(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Yields the code fences of a language: the line where the code starts, and the code."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        if match[1] == language:
            yield text[: match.start(2)].count("\n") + 1, match[2]


def program(page: Path) -> str:
    """Returns the page's Python fences as one program, with the page's line numbers, so that tracebacks point into it."""
    lines: list[str] = []
    for start, code in fences(page, "python"):
        lines += [""] * (start - 1 - len(lines)) + code.splitlines()
    return "\n".join(lines)


def run(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a new process, on this checkout, with one thread and no network."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
