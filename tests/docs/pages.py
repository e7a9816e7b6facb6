"""The documentation pages and their contents."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
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
    """Returns the page's Python fences as one program, with the page's line numbers, so that tracebacks point into it.

    Where the page prints an error and says its sentence in a comment, the program compares them, and it fails where an error did
    not come.
    """
    lines: list[str] = []
    for start, code in fences(page, "python"):
        lines += [""] * (start - 1 - len(lines)) + code.splitlines()
    sentences = [n for n, line in enumerate(lines) if _SENTENCE.match(line)]
    for n in sentences:
        lines[n] = _SENTENCE.sub(_compared, lines[n])
    if sentences:
        # the first line of a page is its title
        lines[0] = "_came = []"
        lines.append(f"assert len(_came) == {len(sentences)}, 'of the errors that the page shows some did not come'")
    return "\n".join(lines)


def printed_errors(page: Path) -> list[tuple[str, str]]:
    """Returns what a page prints of errors, each with the sentence that the page says it prints, "" for none."""
    code = "\n".join(code for _, code in fences(page, "python"))
    return [(match["what"], match["sentence"] or "") for match in _PRINTED.finditer(code)]


_PRINTED = re.compile(r"^ *print\((?P<what>(?:\w+\.)?error)\)(?:\s*# (?P<sentence>.+))?$", re.MULTILINE)
_SENTENCE = re.compile(r"^(?P<indent> *)print\((?P<what>(?:\w+\.)?error)\)\s*# (?P<sentence>.+)$")


def _compared(match: re.Match[str]) -> str:
    """A line that compares a sentence; where it ends with three dots, its beginning."""
    what, sentence = match["what"], match["sentence"].strip()
    part = f"[:{len(sentence) - 3}]" if sentence.endswith("...") else ""
    found = f"str({what}).splitlines()[0]{part}"
    return f"{match['indent']}_came.append(1); assert {found} == {sentence.removesuffix('...')!r}, str({what})"


def run(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a new process, on this checkout, with one thread and no network."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)} | OFFLINE, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run_script(path: Path, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs a script in a process of its own in `folder`, and returns its exit code, output and errors.

    The process is forked from one that has imported PyTorch, which takes most of the time of a short script.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rooftile"])
    process = context.Process(target=_run_here, args=(path, folder, arguments))
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{path} ran for 300 s")
    return process.exitcode, (folder / "output").read_text(encoding="utf-8"), (folder / "errors").read_text(encoding="utf-8")


def _run_here(path: Path, folder: Path, arguments: tuple[str, ...]) -> None:
    import torch

    os.environ |= OFFLINE
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [str(path), *arguments]
    with (
        open("output", "w", encoding="utf-8") as output, open("errors", "w", encoding="utf-8") as errors,
        redirect_stdout(output), redirect_stderr(errors),
    ):  # fmt: skip
        try:
            runpy.run_path(str(path), run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise
