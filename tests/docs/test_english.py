"""Checks the mechanical rules of our English over all source files and pages: see "English" in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.unit.budget import PHRASES, phrases_of

FOLDERS = ("rooftile", "rooftile_lab", "tests", "scripts", "examples")
FIRST_WORDS = {"What", "Of", "Where", "Which", "As"}
# private names for things that have a name in the field
PRIVATE = re.compile(
    r"\b(row_of_work|row_words|over_dim|with_care|paged_alike|weights_8bit|low_precision|sum_of_dq|few_bits|FewBits|_housed|_grown|heirs)\b"
)
# rates: "per", not "a"
RATE = re.compile(r"\b(?:tokens|requests|bytes|FLOPs|scales?|words?) a (?:second|token|row|byte|block|channel|head|thread)\b")
FEW_BITS = re.compile(r"\b(few|eight)[ -]bits\b", re.IGNORECASE)


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
        if match := RATE.search(text):
            yield f"{number}: write 'per' for a rate: {match[0]}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_comments_and_names_keep_the_rules(folder):
    sources = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    assert sources
    found = [f"{path.relative_to(ROOT)}:{line}" for path in sources for line in offences(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_titles_name_formats(page):
    titles = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert [title for title in titles if FEW_BITS.search(title)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "api"], ids=lambda page: page.name)
def test_a_page_names_its_nouns(page):
    """Pages of the reference come from docstrings, whose phrases are in the budget; code in backticks is quoted."""
    words = re.sub(r"`[^`\n]+`", "", page.read_text(encoding="utf-8"))
    assert phrases_of(words) == dict.fromkeys(PHRASES, 0)


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
        ("# 4 bytes a token", 1),
        ("# 4 bytes per token", 0),
        ('"""Attention in few bits."""', 1),
    ],
)
def test_the_rules_find_what_breaks_them(source, due):
    assert len(list(offences(source))) == due
