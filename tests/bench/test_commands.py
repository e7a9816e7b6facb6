"""Each benchmark is one command of `rooftile bench`, and each command writes rows of its own suite."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rooftile_lab
from rooftile.errors import InvalidInput
from rooftile_lab.bench import results
from rooftile_lab.bench.suites import SUITES
from rooftile_lab.cli.bench import COMMANDS
from rooftile_lab.cli.rows import chosen_words, numbers

LAB = Path(rooftile_lab.__file__).parent
RESULTS = LAB.parent / "benchmarks/results"
FILES = {str(path.relative_to(LAB)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(LAB.rglob("*.py"))}
# all else that Python can run: the command itself, a page's tables, and the second processes of suites
ENTRANCES = {
    "__main__.py", "bench/results.py", "bench/engine_start.py", "bench/suites/cpu.py", "bench/suites/ladder.py",
    "bench/suites/long.py", "bench/server/on_ray.py",
}  # fmt: skip


def written(tree: ast.AST) -> set[str]:
    """Returns the names of suites that a file writes into rows: `suite="..."`, or a dictionary's `"suite": "..."`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "suite" and isinstance(node.value, ast.Constant):
            found.add(node.value.value)
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found |= {
                value.value for key, value in pairs
                if isinstance(key, ast.Constant) and key.value == "suite" and isinstance(value, ast.Constant)
            }  # fmt: skip
    return found


def test_every_suite_of_rows_is_a_command_and_a_file_writes_one() -> None:
    suites = {name: written(tree) for name, tree in FILES.items()}
    assert {name: found for name, found in suites.items() if len(found) > 1} == {}
    # the two commands that only read rows
    assert set().union(*suites.values()) == COMMANDS.keys() - {"list", "compare"}
    for name in SUITES:
        assert suites[f"bench/suites/{name.replace('-', '_')}.py"] <= {name}


def test_every_published_row_is_of_a_command() -> None:
    found = {row.suite for path in RESULTS.glob("*.jsonl") for row in results.read(path)}
    assert len(found) > 20
    assert found - COMMANDS.keys() == set()


def test_the_page_on_benchmarks_lists_every_command() -> None:
    page = (LAB.parent / "docs/how-to/benchmark.md").read_text(encoding="utf-8")
    table = page.partition("| suite | measures |")[2].partition("\n\n")[0]
    listed = [name for line in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall("`([a-z-]+)`", line)]
    assert sorted(listed) == sorted(COMMANDS.keys() - {"list", "compare"})


def test_no_program_is_run_by_hand_beside_the_commands() -> None:
    def runs(tree: ast.Module) -> bool:
        return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)

    # the programs that a diagnosis runs are scripts, as a user's are
    found = {name for name, tree in FILES.items() if runs(tree) and not name.startswith("bench/diagnosis/public/")}
    assert found == ENTRANCES


def test_words_and_numbers_are_separated_by_commas() -> None:
    assert numbers("--rows", " 1, 16 ") == [1, 16]
    assert chosen_words("--formats", "fp8,int4", ("fp8", "int4", "w8")) == ["fp8", "int4"]
    for listed, wrong in (("fp9", "fp9"), ("fp8,fp9", "fp9"), ("", "")):
        with pytest.raises(InvalidInput, match=f"--formats has '{wrong}'; give some of fp8 by commas"):
            chosen_words("--formats", listed, ["fp8"])
    for listed in ("0", "-1", "1.5", ","):
        with pytest.raises(InvalidInput, match=f"--rows is '{listed}'; give whole numbers"):
            numbers("--rows", listed)
