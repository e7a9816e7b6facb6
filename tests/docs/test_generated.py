"""The committed pages are those that their scripts write, and pyproject agrees with the package."""

from __future__ import annotations

import inspect
import re
import subprocess
import tomllib
from functools import cache

import pytest

import rooftile
from rooftile_lab.bench.results import write_tables
from scripts.write_reference import PAGES
from tests.docs.pages import NAMES, ROOT, run

TABLE = re.compile(r"<!-- table: (\S+) [^>]*-->\n(.*?)<!-- /table -->", re.DOTALL)


@cache
def checked(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, which checks all of its pages at once."""
    return run([str(ROOT / "scripts" / script), "--check"], ROOT)


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("write_tables.py", "docs/reference/backends.md"),
        ("write_tables.py", "docs/reference/approximate.md"),
        ("write_tables.py", "docs/how-to/choose-a-method.md"),
        ("write_tables.py", "docs/how-to/diagnose.md"),
        ("write_tables.py", "docs/reference/diagnosis-truth.md"),
        ("write_reference.py", "docs/reference/api/index.md"),
        ("write_operators.py", "docs/reference/operators.md"),
        ("write_transformers_models.py", "docs/reference/transformers-models.md"),
        ("write_entrance.py", "README.md"),
        ("write_vllm.py", "docs/reference/vllm.md"),
    ],
)
def test_running_the_script_changes_nothing(script, page):
    before = (ROOT / page).read_text(encoding="utf-8")
    done = checked(script)
    assert done.returncode == 0, f"{done.stderr}\nrun: make tables"
    assert (ROOT / page).read_text(encoding="utf-8") == before


def test_the_figures_are_what_their_script_draws():
    done = run([str(ROOT / "scripts" / "write_figures.py"), "--check"], ROOT)
    assert done.returncode == 0, f"{done.stderr}\nrun: make tables"


@pytest.mark.parametrize("name", [name for name in NAMES if TABLE.search((ROOT / name).read_text(encoding="utf-8"))])
def test_tables_of_results_are_what_their_lines_say(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    absent = [body for source, body in TABLE.findall(text) if not (ROOT / source).exists()]
    # every table has its file of results
    assert "".join(absent) == ""
    assert absent or write_tables(text, ROOT) == text


def test_the_version_and_the_python_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == rooftile.__version__
    assert project["requires-python"] == ">=3.11"
    assert "(3, 11)" in (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert f"## {rooftile.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_public_name_of_the_package_is_in_the_reference():
    written = {name for page in PAGES for section in page.sections for name in section.names}
    named = {name for name in rooftile.__all__ if not inspect.ismodule(getattr(rooftile, name))}
    assert "attention" in named
    assert named - written - {"__version__"} == set()
