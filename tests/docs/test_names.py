"""Everything that the pages name exists: paths, links, make targets, commands and public names."""

from __future__ import annotations

import ast
import re

import pytest
from typer.testing import CliRunner

import rooftile
from rooftile.cli.app import app
from tests.docs.pages import NAMES, ROOT, fences

WORDS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
# `folder/file.ext` or `folder/`, in backticks
PATH = re.compile(r"`((?:rooftile|tests|docs|examples|scripts|benchmarks|\.ci)/[\w./*-]*)`")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)(?:#[^)]*)?\)")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
COMMAND = re.compile(r"(?:^|`)(?:\.venv/bin/)?rooftile [a-z][^#`\n]*", re.MULTILINE)
PUBLIC = re.compile(r"\b(?:rt|rooftile)\.([A-Za-z_]+)\b(?!/)")


def code_and_ticks(name: str) -> str:
    """Returns the code of a page: its fences and the text in backticks."""
    blocks = [code for language in ("sh", "python") for _, code in fences(ROOT / name, language)]
    return "\n".join([*blocks, *re.findall(r"`[^`\n]+`", WORDS[name])])


@pytest.mark.parametrize("name", NAMES)
def test_every_path_named_exists(name):
    missing = [path for path in PATH.findall(WORDS[name]) if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    folder = (ROOT / name).parent
    broken = [link for link in LINK.findall(WORDS[name]) if not (folder / link).exists()]
    assert not broken


def test_every_make_target_named_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {target for name in NAMES for target in MAKE.findall(code_and_ticks(name))}
    assert named
    assert {target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


COMMANDS = sorted({match[0].strip("` ") for name in NAMES for match in COMMAND.finditer(code_and_ticks(name))})


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_named_exists_and_has_its_options(line):
    words = line.removeprefix(".venv/bin/").split()[1:]
    options = {word for word in words if word.startswith("--")} - {"--help"}
    # the names of a command and its subcommand, without options and files
    names = [word for word in words[:2] if re.fullmatch("[a-z-]+", word) and not word.startswith("-")]
    shown = CliRunner().invoke(app, [*names, "--help"])
    assert shown.exit_code == 0, shown.output
    assert {option for option in options if option not in shown.output} == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_used_exists(name):
    named = set(PUBLIC.findall("\n".join(code for _, code in fences(ROOT / name, "python"))))
    package = {path.stem for path in (ROOT / "rooftile").iterdir()}
    assert {word for word in named if not hasattr(rooftile, word) and word not in package} == set()


# a line of a package's docstring that says what a part is for: "name   text", "a, b   text", "folder/   text"
LISTED = re.compile(r"^\s*([a-z_0-9]+(?:, [a-z_0-9]+)*)(?:\.py|/)?\s{2,}\S", re.MULTILINE)
PACKAGES = sorted(path for name in ("rooftile", "rooftile_lab") for path in (ROOT / name).rglob("__init__.py"))


def test_every_part_that_a_package_lists_exists():
    found = {
        path.parent / part: (path.parent / part).exists() or (path.parent / f"{part}.py").exists()
        for path in PACKAGES
        for line in LISTED.findall(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        for part in line.split(", ")
    }
    assert len(found) > 100
    assert [str(part.relative_to(ROOT)) for part, is_there in found.items() if not is_there] == []
