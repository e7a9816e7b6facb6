"""Prints how many cases each backend has in `make test` and in `make test-all`, as a Markdown table.

python -m tests.count_cases
"""

# ruff: noqa: T201 - it prints its result
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from rooftile.exact import dispatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OTHERS = "none in particular"


class Count:
    """A plugin of pytest that counts what is collected: cases by backend, and those of them in `make test`."""

    def __init__(self) -> None:
        self.all: Counter[str] = Counter()
        self.quick: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if "gpu" in item.path.parts:
                continue
            self.all[backend_of(item)] += 1
            self.quick[backend_of(item)] += item.get_closest_marker("sweep") is None


def backend_of(item: pytest.Item) -> str:
    """Returns the backend that a test has as parameter, that its file is named after, or that the interpreter runs."""
    given = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
    named = [name for name in dispatch.BACKENDS if name in item.path.stem]
    return given or next(iter(named), "triton" if INTERPRETED else OTHERS)


def main() -> None:
    if len(sys.argv) > 1:
        count = Count()
        pytest.main(["-q", "--collect-only", "--no-summary", *sys.argv[1:]], plugins=[count])
        print(json.dumps([count.quick, count.all]))
        return
    quick: Counter[str] = Counter()
    everything: Counter[str] = Counter()
    for interpreted, folders in (("0", ["tests", "--ignore", "tests/interpreter"]), ("1", ["tests/interpreter"])):
        command = [sys.executable, "-m", "tests.count_cases", *folders]
        environment = os.environ | {"TRITON_INTERPRET": interpreted}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        quick.update(found[0])
        everything.update(found[1])
    print("| backend | `make test` | `make test-all` |\n|---|--:|--:|")
    for name in (*dispatch.BACKENDS, OTHERS):
        print(f"| {name} | {quick[name]:,} | {everything[name]:,} |")
    print(f"| all | {quick.total():,} | {everything.total():,} |")


if __name__ == "__main__":
    main()
