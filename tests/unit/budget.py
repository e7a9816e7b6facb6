"""Measures the size of the package: `python -m tests.unit.budget` writes budget.toml anew.

`test_budget.py` compares both. A change that lets a number grow has to write the file again, so that a reviewer sees the growth.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rooftile"
BUDGET = Path(__file__).with_suffix(".toml")

# a folder with more files than this is in the budget
CROWDED = 16
OPTIONS = ("softcap", "dropout", "deterministic", "alibi")
# phrases by which a sentence leaves its noun out: name the noun
PHRASES = ("that of", "those of", "so many", "has none", "have none", "nobody")
SAID = {
    "lines": "lines of Python in each room of the package; files beside the rooms are in the room `root`",
    "lab": "lines of Python in the package beside it, which nothing of the product imports",
    "entries": "files and folders at the root of the package",
    "folders": f"entries of each folder below it that has more than {CROWDED}",
    "options": "files that name an option of attention as an argument of a function",
    "phrases": "places in both packages where a phrase stands for a noun that is left out",
    "kernels": "arguments of the kernel function that takes most",
    "moves": "calls that enter another room of the package than their caller's, on a CPU",
}

Budget = dict[str, dict[str, int]]


def sources(package: Path) -> list[Path]:
    """Returns the Python files of a package; none if there is no such folder."""
    return sorted(package.rglob("*.py"))


def length(path: Path) -> int:
    """Returns the number of a file's lines."""
    return len(path.read_text(encoding="utf-8").splitlines())


def measured(package: Path = PACKAGE) -> Budget:
    """Returns what can be read from the files of a package."""
    lines: Counter[str] = Counter()
    options: Counter[str] = Counter(dict.fromkeys(OPTIONS, 0))
    phrases: Counter[str] = Counter(dict.fromkeys(PHRASES, 0))
    lab = sources(package.parent / "rooftile_lab")
    most = 0
    for path in lab:
        phrases.update(phrases_of(path.read_text(encoding="utf-8")))
    for path in sources(package):
        text = path.read_text(encoding="utf-8")
        phrases.update(phrases_of(text))
        parts = path.relative_to(package).parts
        lines[parts[0] if len(parts) > 1 else "root"] += len(text.splitlines())
        host, kernels = arguments(text)
        options.update(host & set(OPTIONS))
        most = max(most, *kernels, 0)
    folders = {package, *(path.parent for path in sources(package))}
    entries = {folder: sum(path.name != "__pycache__" for path in folder.iterdir()) for folder in folders}
    return {
        "lines": dict(sorted(lines.items())),
        "lab": {"lines": sum(length(path) for path in lab)},
        "entries": {"root": entries.pop(package)},
        "folders": {str(folder.relative_to(package)): count for folder, count in sorted(entries.items()) if count > CROWDED},
        "options": {option: options[option] for option in OPTIONS},
        "phrases": {phrase: phrases[phrase] for phrase in PHRASES},
        "kernels": {"arguments": most},
    }


def phrases_of(text: str) -> dict[str, int]:
    """Counts the phrases of a source, also where one goes on in the next line of a comment."""
    patterns = {phrase: r"\b" + phrase.replace(" ", "[ \n#]+") + r"\b" for phrase in PHRASES}
    return {phrase: len(re.findall(pattern, text, re.IGNORECASE)) for phrase, pattern in patterns.items()}


def arguments(text: str) -> tuple[set[str], list[int]]:
    """Returns the names of all arguments of functions on the host, and how many arguments each kernel function takes."""
    host: set[str] = set()
    kernels = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                kernels.append(len(names))
            else:
                host.update(names)
    return host, kernels


def moves() -> dict[str, int]:
    """Returns the moves between rooms of five calls, counted in a process of its own, whose first call is a first call."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.unit.moves"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def growth(budget: Budget, found: Budget) -> list[str]:
    """Returns what is larger than the budget allows, or has no budget."""
    return [
        f"{section}, {name}: {size}; the budget has {budget.get(section, {}).get(name, 0)}"
        for section, sizes in found.items()
        for name, size in sizes.items()
        if size > budget.get(section, {}).get(name, 0)
    ]


def as_toml(budget: Budget) -> str:
    parts = ["# Written by `python -m tests.unit.budget`; says how large the package may be.\n"]
    for section, sizes in budget.items():
        parts.append(f"\n# {SAID[section]}\n[{section}]\n")
        parts += [f"{json.dumps(name)} = {size}\n" for name, size in sizes.items()]
    return "".join(parts)


if __name__ == "__main__":
    BUDGET.write_text(as_toml(measured() | {"moves": moves()}), encoding="utf-8")
