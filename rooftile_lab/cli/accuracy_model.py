"""`rooftile accuracy MODEL --data FILE`: what a model loses in each format of weights, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rooftile.cli.output import print_json, print_table, progress
from rooftile.drawing.units import size
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    from rooftile_lab.bench.model_accuracy import Accuracy


def formats_lose(
    model: str | None, data: Path | None, formats: Sequence[str] | None, length: int, pieces: int, device: str,
    json: bool,
) -> None:  # fmt: skip
    """Prints what each format loses on a text."""
    from rooftile.engine.start.checkpoint import find_folder

    if model is None or data is None:
        there, missing = ("--data", "no model") if model is None else ("a model", "no --data")
        raise InvalidInput(f"{there} is given and {missing}; write rooftile accuracy MODEL --data FILE, a text")
    if not data.is_file():
        raise InvalidInput(f"--data is {data}, which is no file; give a text")
    text = data.read_text(encoding="utf-8", errors="replace")
    folder = find_folder(model)
    # all that can be refused without torch is refused by now, before its import
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench.model_accuracy import FORMATS, measure

    target = device_of(device)
    with progress() as say:
        found = measure(folder, text, target, formats=formats or FORMATS, length=length, pieces=pieces, say=say)
    if json:
        print_json({"model": model, "data": str(data), "device": str(target), "formats": [asdict(one) for one in found]})
        return
    columns = ["weights", "bytes", f"nats per token above {found[0].format}", "largest change of a logit"]
    rows = [_row(one) for one in found]
    if target.type == "cuda":
        columns.append("tokens per second, one request")
        for row, one in zip(rows, found, strict=True):
            row.append("-" if one.tokens_s is None else f"{one.tokens_s:,.0f}")
    print_table(f"{model} on {data}: {found[0].nats:.4f} nats per token in {found[0].format}", columns, rows)
    for one in found:
        if one.reason:
            print(f"{one.format}: {one.reason}")


def _row(one: Accuracy) -> list[str]:
    if one.nbytes is None:
        return [one.format, "-", "-", "-"]
    return [one.format, size(one.nbytes), f"{one.above:+.4f}", f"{one.largest_change:.3g}"]
