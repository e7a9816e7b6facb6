"""`rooftile quantise`: writes a checkpoint with quantised or 2:4 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli.output import JsonOption, print_json, progress
from rooftile.drawing.units import size


def quantise(
    model: Annotated[
        str, typer.Argument(help="A 16-bit checkpoint's folder (config.json, *.safetensors), or its name on the Hub.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, which is not there yet.")],
    format: Annotated[
        str, typer.Option("--format", help="Format of the projections: fp8, fp8_tile, int8, w8, int4, mxfp8, mxfp4, nvfp4, 2:4.")
    ] = "int4",
    group: Annotated[
        int | None, typer.Option("--group", help="int4: numbers of a row that share a scale: 32, 64 or 128 (the default).")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download a named model that is not in the Hugging Face Hub's cache here.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Quantises a checkpoint's projections, and writes it as compressed-tensors, which vLLM and Transformers read too.

    Format 2:4 keeps the two largest of each four weights, without training for it, and has a layout that Rooftile alone reads.

    Example: rooftile quantise Llama-3.2-1B Llama-3.2-1B-int4 --format int4 --group 128
    """
    from rooftile.engine.start.checkpoint import find_folder

    folder = find_folder(model, download=download)
    from rooftile.models.checkpoints.write import quantise_folder

    with progress() as say:
        quantise_folder(folder, out, format, group=group, say=say)
    before, after = (sum(path.stat().st_size for path in each.glob("*.safetensors")) for each in (folder, out))
    if json:
        print_json({"model": model, "out": str(out), "format": format, "bytes_before": before, "bytes_after": after})
        return
    print(f"wrote {out}: {size(after)}, {after / before:.0%} of {size(before)}")
