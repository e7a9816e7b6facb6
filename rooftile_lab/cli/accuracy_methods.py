"""`rooftile accuracy --methods`: what each approximate method loses, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rooftile.cli.output import print_json, print_table, progress

if TYPE_CHECKING:
    import torch

    from rooftile_lab.bench.methods.losses import Loss
    from rooftile_lab.bench.methods.way import Sizes


def methods_lose(
    sizes: Sizes, target: torch.device, dtype: str, draws: int, tensors: Path | None, json: bool
) -> None:  # fmt: skip
    """Prints the loss of each method; `tensors` is a user's file of q, k and v."""
    from rooftile.exact.spec import DTYPES
    from rooftile_lab.bench.accuracy import saved
    from rooftile_lab.bench.methods.losses import losses

    own = None if tensors is None else saved(tensors, target)
    with progress() as say:
        found = losses(sizes, target, DTYPES[dtype], draws=draws, own=own, say=say)
    what = f"{sizes.N:,} tokens, {sizes.H} heads of {sizes.D}, {dtype}"
    if json:
        methods = [asdict(loss) | {"recall": loss.recall} for loss in found]
        named = None if tensors is None else str(tensors)
        print_json({"what": what, "tensors": named, "device": str(target), "methods": methods})
        return
    columns = ["method", "error, Gaussian", "needle found", "at each tenth of the text, %"]
    rows = [
        [loss.method, _error(loss.gaussian), "-" if loss.recall is None else f"{100 * loss.recall:.0f} %", _depths(loss)]
        for loss in found
    ]  # fmt: skip
    if tensors is not None:
        columns.append(f"error, {tensors.name}")
        for row, loss in zip(rows, found, strict=True):
            row.append(_error(loss.own))
    print_table(f"What methods lose without training: {what}", columns, rows)
    for loss in found:
        if loss.reason:
            print(f"{loss.method}: {loss.reason}")


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value < 0.01 else f"{value:.2f}"


def _depths(loss: Loss) -> str:
    return " ".join(f"{100 * share:.0f}" for share in loss.found)
