"""Writes docs/reference/transformers-models.md: attn_implementation="rooftile" beside "eager" in every family of models.

python scripts/write_transformers_models.py              # compares every family at toy size: some ten minutes
python scripts/write_transformers_models.py T5Model ...  # compares these again and keeps the other lines
"""

from __future__ import annotations

import json
import re
import signal
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.integrations.every_model.build import models  # noqa: E402 - needs the path
from tests.integrations.every_model.compare import Row, compare  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "transformers-models.md"
ROWS = ROOT / "tests" / "integrations" / "every_model" / "rows.jsonl"
SECONDS = 180

HEAD = """# Models of Transformers

Every family of models that the auto classes of Transformers {version} know: one class of each, with both of its halves or with
logits where there is one, built at toy size with random weights, and run on a CPU in float32 with
`attn_implementation="rooftile"` and with `"eager"`. Written by `scripts/write_transformers_models.py`;
`tests/integrations/test_every_model.py` compares again.

- *outputs*: every floating-point output, without padding. *gradients*: the gradient of every parameter.
- *future*: the outputs after other last tokens. A causal model that saw the future would differ.
- *padding*: outputs and gradients of real tokens, with padding on the right and on the left.

Models that take images or sounds beside text were given text alone where they accept that; their towers have lines of their own.

| verdict | families |
|---|--:|
{counts}
"""
SECTIONS = {
    "equal": (
        "## Equal to eager\n\nEach of these called Rooftile's attention.\n\n| family | class | compared |\n|---|---|---|\n"
    ),
    "refused": (
        '## Refused\n\n`attn_implementation="rooftile"` raises `Unsupported` where the model is built or first called. Use '
        '`"eager"`, or give\neach part of a model its own name in a dict.\n\n| family | class | why |\n|---|---|---|\n'
    ),
    "no attention": (
        "## Without a call\n\nNo attention, or only attention of its own that takes no mask; the outputs are equal.\n\n"
        "| family | class |\n|---|---|\n"
    ),
    "not run": (
        "## Not compared\n\nEager attention itself cannot be built or run at toy size with the inputs that the sweep makes.\n\n"
        "| family | class | reason |\n|---|---|---|\n"
    ),
    "differs": "## Different from eager\n\n| family | class | how |\n|---|---|---|\n",
}


def page(rows: list[Row], version: str) -> str:
    """Returns the whole page in Markdown, for the version of Transformers that the rows were found with."""
    counted = Counter(row.verdict for row in rows)
    counts = "\n".join(f"| {verdict} | {counted[verdict]} |" for verdict in SECTIONS if counted[verdict])
    text = HEAD.format(version=version, counts=counts)
    for verdict, head in SECTIONS.items():
        lines = [_line(row) for row in rows if row.verdict == verdict]
        text += f"\n{head}" + "\n".join(lines) + "\n" if lines else ""
    return text


def _line(row: Row) -> str:
    said = _said(row)
    return f"| {row.family} | `{row.model}` |" + (f" {said} |" if said else "")


def _said(row: Row) -> str:
    if row.verdict == "equal":
        return row.compared
    if " never asks for an attention implementation" in row.reason:
        return "never asks for an attention implementation"
    return row.reason.replace("|", "/").replace("<", "&lt;").replace("[", r"\[")[:120]


def kept() -> dict[str, Row]:
    """Returns the rows of the last sweep by class."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    return {row.model: row for row in (Row(**json.loads(line)) for line in lines)}


def written_with() -> str:
    """Returns the version of Transformers that the page names."""
    found = re.search(r"Transformers (\d+\.\d+\.\d+) know", PAGE.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{PAGE.name} does not say which Transformers it was written with")
    return found[1]


def main(again: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    if again and written_with() != transformers.__version__:
        sys.exit(f"the other lines were found with Transformers {written_with()}, and this is {transformers.__version__}")
    before = kept() if again else {}
    rows = []
    for family, name in models():
        row = before.get(name)
        if row is None or name in again:
            row = _within(family, name)
            print(f"{row.verdict:<14}{name}  {row.reason[:100]}", flush=True)
        rows.append(row)
    ROWS.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    PAGE.write_text(page(rows, transformers.__version__), encoding="utf-8")


def _within(family: str, name: str) -> Row:
    """Compares one class; a class that takes too long is not compared."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes longer than {SECONDS} s on this machine")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        row = compare(family, name)
    finally:
        signal.alarm(0)
    return Row(family, name, "not run", 0, "", row.reason) if "TimeoutError" in row.reason else row


if __name__ == "__main__":
    if "--check" in sys.argv:
        due = page(list(kept().values()), written_with())
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == due else f"{PAGE.name} is out of date")
    main(sys.argv[1:])
    print(f"wrote {PAGE.relative_to(ROOT)}")
