"""Checks the mechanical rules of our English over all source files and pages: see "English" in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

FOLDERS = ("rooftile", "tests", "scripts", "examples", "benchmarks")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
FIRST_WORDS = {"What", "Of", "Where", "Which", "As"}
# private names for things that have a name in the field
PRIVATE = re.compile(
    r"\b(row_of_work|row_words|over_dim|with_care|paged_alike|weights_8bit|low_precision|sum_of_dq|few_bits|FewBits|_housed|_grown|heirs)\b"
)
FEW_BITS = re.compile(r"\b(few|eight)[ -]bits\b", re.IGNORECASE)
# offences that a folder still has; a number may only shrink
ALLOWED: dict[str, int] = {
    "benchmarks/": 7,
    "rooftile/api.py": 1,
    "rooftile/backends/device/": 4,
    "rooftile/backends/hopper/": 75,
    "rooftile/backends/triton/": 15,
    "rooftile/bench/": 18,
    "rooftile/dispatch.py": 1,
    "rooftile/fused/": 1,
    "rooftile/spec.py": 8,
}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields each comment, a block of lines as one: its first line's number, and its text."""
    last, start, words = -2, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, whole = token.start[0], token.line.lstrip().startswith("#")
        if whole and line == last + 1:
            words += " " + token.string.lstrip("# ")
        else:
            if words:
                yield start, words
            start, words = line, token.string.lstrip("# ")
        last = line if whole else -2
    if words:
        yield start, words


def offences(source: str) -> Iterator[str]:
    """Yields each breach of a rule in a Python file, as "line: what is wrong"."""
    for line, text in docstrings(source):
        if re.match(r"\w*", text)[0] in FIRST_WORDS:
            yield f"{line}: the docstring begins with {text.split()[0]!r}: {text.splitlines()[0]}"
        if FEW_BITS.search(text.splitlines()[0]):
            yield f"{line}: say FP8, INT8 or 8 bits: {text.splitlines()[0]}"
    for line, text in comments(source):
        if re.match(r"of\b", text, re.IGNORECASE):
            yield f"{line}: the comment begins with 'of': {text}"
    for number, text in enumerate(source.splitlines(), 1):
        if match := PRIVATE.search(text):
            yield f"{number}: a private word: {match[0]}"


def folder_of(path: Path) -> str:
    """Returns the entry of ALLOWED that a file falls under, or "" if there is none."""
    name = path.relative_to(ROOT).as_posix()
    return max((folder for folder in ALLOWED if name.startswith(folder)), key=len, default="")


def test_docstrings_comments_and_names_keep_the_rules():
    found = {path: [] if path == Path(__file__) else list(offences(path.read_text(encoding="utf-8"))) for path in SOURCES}
    counts = Counter[str]()
    for path, lines in found.items():
        counts[folder_of(path)] += len(lines)
    over = {folder for folder, count in counts.items() if count > ALLOWED.get(folder, 0)}
    told = [f"{path.relative_to(ROOT)}:{line}" for path, lines in found.items() if folder_of(path) in over for line in lines]
    assert not told, "\n".join(told)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_titles_name_formats(page):
    titles = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert [title for title in titles if FEW_BITS.search(title)] == []


@pytest.mark.parametrize(
    ("source", "due"),
    [
        ('"""Of each row."""', 1),
        ('"""Offsets of rows."""', 0),
        ("x = 1  # of a row\n", 1),
        ("# the sum\n# of a row\nx = 1\n", 0),
        ("y = 2  # y\n# of a row\nx = 1\n", 1),
        ("def f():\n    '''Which one.'''\n", 1),
        ("over_dim = 1", 1),
        ('"""Attention in few bits."""', 1),
    ],
)
def test_the_rules_find_what_breaks_them(source, due):
    assert len(list(offences(source))) == due
