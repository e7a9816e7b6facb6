"""`rooftile calibrate`: fits Loki to a checkpoint's model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.output import DeviceOption, JsonOption, print_json, print_table, progress
from rooftile.errors import InvalidInput
from rooftile.runtime.dtypes import dtype_word

if TYPE_CHECKING:
    from rooftile.approximate import LokiLayers


def calibrate(
    model: Annotated[
        str, typer.Argument(help="The checkpoint's folder (config.json, *.safetensors, tokenizer.json), or its name on the Hub.")
    ],
    text: Annotated[Path, typer.Option("--text", help="A text file like what the model will read; some pages of it.")],
    dims: Annotated[float, typer.Option("--dims", help="Share of each head's dimensions that choose keys.")] = 0.25,
    keep: Annotated[float, typer.Option("--keep", help="Share of the cached keys that an answer reads.")] = 0.25,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("loki.pt"),
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens that are read at once.")] = 2048,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Dtype of the model: bf16, fp16, fp32; auto for the checkpoint's.")
    ] = "auto",
    download: Annotated[
        bool, typer.Option("--download", help="Download a named model that is not in the Hugging Face Hub's cache here.")
    ] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Fits Loki to the keys of a checkpoint's model on a text, and writes the file that LLM(approximate=FILE) reads.

    Example: rooftile calibrate Llama-3.2-1B --text book.txt --dims 0.25 --keep 0.25 --out loki.pt
    """
    from rooftile.engine.start.checkpoint import find_folder

    dtype = dtype_word(dtype, has=("bf16", "fp16", "fp32"), auto=True)
    for name, share in (("--dims", dims), ("--keep", keep)):
        if not 0 < share <= 1:
            raise InvalidInput(f"{name} is {share}; must be above 0 and at most 1")
    if out.is_dir() or not out.parent.is_dir():
        raise InvalidInput(f"--out is {out}, where no file can be written; give a file in a folder that is there")
    words, folder = _words_of(text), find_folder(model, download=download)
    # all that can be refused without torch is refused by now, before its import
    from rooftile.engine.mixers.loki import calibration
    from rooftile.engine.text.tokenizer import Tokenizer
    from rooftile.hardware.device import device_of
    from rooftile.models import Decoder

    target = device_of(device)
    tokens = Tokenizer.from_folder(folder).encode(words)
    with progress() as say:
        say(f"reading {model}")
        decoder = Decoder.from_folder(folder, dtype, target)
        loki = calibration.calibrate(decoder, tokens, dims=dims, keep=keep, length=length, say=say)
    loki.save(out)
    _show(loki, model, len(tokens), out, json)


def _show(loki: LokiLayers, model: str, tokens: int, out: Path, json: bool) -> None:
    """Prints what was fitted, and how much of the keys' variance lies in the dimensions that choose."""
    shares = loki.explained
    if json:
        sizes = {"layers": len(loki), "dims": loki.dims, "keep": loki.keep, "leading": loki.leading}
        print_json({"model": model, "tokens": tokens, "file": str(out), **sizes, "variance": shares})
        return
    rows = [(str(n), f"{share:.1%}") for n, share in enumerate(shares)]
    title = f"Variance of the keys in the first {loki.leading} dimensions of each head, {tokens:,} tokens"
    print_table(title, ("layer", "share"), rows)
    typer.echo(f'{out} has {loki}; use it with LLM("{model}", approximate="{out}")')


def _words_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--text {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"--text {file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
