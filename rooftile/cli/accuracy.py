"""`rooftile accuracy`: the error of FP8 and INT8 attention, recipe by recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rooftile.bench import accuracy as measured
from rooftile.cli.output import DeviceOption, JsonOption, print_json, print_table, progress
from rooftile.drawing.units import duration, times
from rooftile.errors import InvalidInput
from rooftile.hardware.device import device_of
from rooftile.masks import CAUSAL, FULL
from rooftile.spec import DTYPES

MASKS = {"full": FULL, "causal": CAUSAL}


def accuracy(
    distribution: Annotated[
        str, typer.Option("--distribution", help="Distribution of the random tensors: outliers, gaussian or sink.")
    ] = "outliers",
    tensors: Annotated[
        Path | None, typer.Option("--tensors", help="A file with q, k and v (.safetensors or .pt) to use instead.")
    ] = None,
    dim: Annotated[int, typer.Option("--dim", min=16, max=512, help="The head dim.")] = 128,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens.")] = 2048,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads.")] = 4,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Random draws to average the errors over.")] = 6,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of the tensors: bf16, fp16 or fp32.")] = "bf16",
    mask: Annotated[str, typer.Option("--mask", help="full or causal.")] = "full",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Measures FP8 and INT8 attention: error of each recipe against fp64, and its time, compared with the tensors' own dtype.

    Example: rooftile accuracy --distribution sink --dim 64
    """
    if mask not in MASKS:
        raise InvalidInput(f"--mask is {mask!r}; has {', '.join(MASKS)}")
    if dtype not in DTYPES or dtype == "fp64":
        raise InvalidInput(f"--dtype is {dtype!r}; has bf16, fp16, fp32")
    target = device_of(device)
    shape = (1, length, heads, dim)
    if tensors is None:
        inputs = measured.draws(distribution, shape, draws, DTYPES[dtype], target)
        what = f"{distribution}, {draws} draws of {heads} heads, {length:,} tokens, head dim {dim}, {dtype}, {mask}"
    else:
        inputs = iter([measured.saved(tensors, target)])
        what = f"{tensors}, {mask}"
    with progress() as say:
        found = measured.losses(inputs, MASKS[mask], say)
    if json:
        print_json({"what": what, "device": str(target), "recipes": [asdict(loss) for loss in found]})
        return
    rows = [
        (
            loss.recipe, f"{loss.rmse:.2e}", times(loss.better), f"{loss.largest:.2e}", f"{1 - loss.cosine:.1e}",
            f"{loss.lse:.1e}", duration(loss.time_us), "in plain operations" if loss.ran == "eager" else loss.ran,
        )
        for loss in found
    ]  # fmt: skip
    columns = ("recipe", "RMSE", "better", "largest", "1 - cosine", "lse, largest", "time", "ran")
    print_table(f"Error against fp64: {what}", columns, rows)
    for line in measured.advice(found):
        typer.echo(line)
