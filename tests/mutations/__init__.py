"""Breaks one line of a copy of the code at a time and prints which tests of `make test` fail.

    python -m tests.mutations              every mutation, as a Markdown table
    python -m tests.mutations NAME ...     these mutations

Exits with status 1 if the tests pass despite a mutation. The lines are in a file per part of the library.
"""

# ruff: noqa: T201 - it prints its result
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations import approximate, attention, experts, hybrids, products, sequences, serving, training
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).parents[2]
PARTS = (attention, approximate, experts, hybrids, products, training, serving, sequences)
MUTATIONS = {name: mutation for part in PARTS for name, mutation in part.MUTATIONS.items()}


def failures(mutation: Mutation) -> list[str]:
    """Returns the ids of the tests that fail in a mutated copy."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rooftile", "rooftile_lab", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        file = Path(folder, mutation.package, mutation.file)
        source = file.read_text()
        assert source.count(mutation.before) == 1, f"{mutation.file} must have this exactly once: {mutation.before}"
        file.write_text(source.replace(mutation.before, mutation.after))
        environment = os.environ | {"PYTHONPATH": folder, "TRITON_INTERPRET": "1" if mutation.interpreted else "0"}
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not sweep and not timing"]
        command = [sys.executable, "-m", "pytest", *options, *mutation.tests]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)


def main(names: list[str]) -> int:
    print("| mutation | line | before | after | tests | red |\n|---|---|---|---|---|--:|")
    survivors = 0
    for name in names or MUTATIONS:
        mutation = MUTATIONS[name]
        red = len(failures(mutation))
        survivors += not red
        before, after = (" ".join(code.split()) for code in (mutation.before, mutation.after))
        print(f"| {name} | `{mutation.file}` | `{before}` | `{after}` | `{' '.join(mutation.tests)}` | {red} |", flush=True)
    return 1 if survivors else 0
