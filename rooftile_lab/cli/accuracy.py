"""`rooftile accuracy`: what a model loses in each format of weights, the error of each recipe of FP8 and INT8 attention, or what
each approximate method loses.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.output import DeviceOption, JsonOption, print_json, print_table, progress
from rooftile.drawing.units import duration, times
from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL, FULL
from rooftile.runtime.dtypes import dtype_word
from rooftile_lab.cli.accuracy_methods import methods_lose
from rooftile_lab.cli.accuracy_model import formats_lose

if TYPE_CHECKING:
    import torch

MASKS = {"full": FULL, "causal": CAUSAL}


def accuracy(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint's folder, or its name on the Hub: measure its formats of weights.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="The text that MODEL reads.")] = None,
    format: Annotated[
        list[str] | None, typer.Option("--format", help="A format of MODEL, such as int4:32; several times; all by default.")
    ] = None,
    pieces: Annotated[int, typer.Option("--pieces", min=1, help="Pieces of --length tokens that MODEL reads.")] = 8,
    methods: Annotated[
        bool, typer.Option("--methods", help="Measure the approximate methods instead: Gaussian tensors, a needle, your tensors.")
    ] = False,
    distribution: Annotated[
        str | None, typer.Option("--distribution", help="The random tensors: outliers (if none is given), gaussian or sink.")
    ] = None,
    tensors: Annotated[
        Path | None, typer.Option("--tensors", help="A file with q, k and v (.safetensors or .pt) to use instead.")
    ] = None,
    dim: Annotated[int, typer.Option("--dim", min=16, max=512, help="The head dim.")] = 128,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Tokens: 2048 by default, 1024 with --methods, 512 of MODEL.")
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads.")] = 4,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Random draws to average the errors over.")] = 6,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of the tensors: bf16, fp16 or fp32.")] = "bf16",
    mask: Annotated[str | None, typer.Option("--mask", help="full (if none is given) or causal.")] = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Measures FP8 and INT8 attention: error of each recipe against fp64, and its time, compared with the tensors' own dtype.

    With MODEL and --data: bytes, nats per token and the largest change of a logit in each format of weights, and on a GPU tokens
    per second. With --methods: what each approximate method loses on Gaussian tensors, on a needle, and on your tensors.

    Example: rooftile accuracy --distribution sink --dim 64
    """
    dtype = dtype_word(dtype, has=("bf16", "fp16", "fp32"))
    if model is not None or data is not None:
        others = {"--methods": methods, "--distribution": distribution, "--tensors": tensors, "--mask": mask}
        given = next((name for name, value in others.items() if value), None)
        if given is not None:
            raise InvalidInput(f"{given} is for tensors, and a model reads --data; leave one of them out")
        formats_lose(model, data, format, length or 512, pieces, device, json)
        return
    if tensors is not None and not tensors.is_file():
        raise InvalidInput(f"--tensors is {tensors}, which is no file; give one with q, k and v")
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench.methods.way import Sizes

    target = device_of(device)
    if methods:
        if distribution is not None or mask is not None:
            given = "--mask" if distribution is None else "--distribution"
            raise InvalidInput(f"{given} is for FP8 and INT8; --methods has Gaussian tensors, a needle, and masks of its own")
        sizes = Sizes(1, length or 1024, heads, heads, dim)
        methods_lose(sizes, target, dtype, draws, tensors, json)
        return
    mask = "full" if mask is None else mask
    if mask not in MASKS:
        raise InvalidInput(f"--mask is {mask!r}; has {', '.join(MASKS)}")
    recipes_lose(distribution or "outliers", tensors, (1, length or 2048, heads, dim), draws, dtype, mask, target, json)


def recipes_lose(
    distribution: str, tensors: Path | None, shape: tuple[int, int, int, int], draws: int, dtype: str, mask: str,
    target: torch.device, json: bool,
) -> None:  # fmt: skip
    """Prints the error of each recipe of 8 bits."""
    from rooftile.exact.spec import DTYPES
    from rooftile_lab.bench import accuracy as measured

    _, length, heads, dim = shape
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
