"""`rooftile plan`: a format for each layer of a checkpoint's model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.output import DeviceOption, JsonOption
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    import torch

# tokens of the text that losses are measured on, at most: every layer and format reads all of them
MOST_TOKENS = 16_384


def plan(
    model: Annotated[str, typer.Argument(help="The checkpoint's folder (config.json, *.safetensors), or its name on the Hub.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Answers that decode at once.")] = 1,
    context: Annotated[
        int | None, typer.Option("--context", min=2, help="Tokens of each answer with its prompt; 1024, or all that MODEL has.")
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", min=0, help="Tokens of prompts that a step reads; 0: decoding alone.")] = 0,
    prompt_share: Annotated[
        float | None, typer.Option("--prompt-share", help="Share of the steps that read prompts; half if not given.")
    ] = None,
    formats: Annotated[str, typer.Option("--formats", help="Formats to choose from, as bf16,fp8,int4:32.")] = "",
    data: Annotated[
        Path | None, typer.Option("--data", help="A text for the losses; without it the errors of layers stand for them.")
    ] = None,
    max_loss: Annotated[
        float | None, typer.Option("--max-loss", help="The largest sum of losses: nats with --data, else relative errors.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Time layers too, in place of ceilings alone.")] = True,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the roofline to this file.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download a named model that is not in the Hugging Face Hub's cache here.")
    ] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Chooses a format for each layer of a checkpoint: the least time on this machine for a loss that you allow.

    Example: rooftile plan Llama-3.1-8B --batch 256 --context 640 --max-loss 0.01
    """
    if html is not None:
        if html.is_dir() or not html.resolve().parent.is_dir():
            raise InvalidInput(f"--html {html} cannot be written; name a file in a folder that exists")
        from rooftile.drawing.page import check_ready

        check_ready()
    share = 0.5 if prompt_share is None else prompt_share
    if not 0 <= share <= 1:
        raise InvalidInput(f"--prompt-share is {share}; must be from 0 to 1")
    if prompt_share is not None and not prompt:
        raise InvalidInput(f"--prompt-share is {share} and no step reads prompts; give --prompt, or leave it out")
    from rooftile.engine.start.checkpoint import find_folder

    text = None if data is None else _read(data)
    folder = find_folder(model, download=download)
    # all that can be refused without torch is refused by now, before its import
    from rooftile.planning.make_plan import plan as make

    rows = {"decode": batch} | ({"prompt": prompt} if prompt else {})
    found = make(
        folder, rows=rows, shares={"decode": 1 - share, "prompt": share} if prompt else None, context=context,
        formats=tuple(word.strip() for word in formats.split(",")) if formats else None, max_loss=max_loss, measure=measure,
        data=None if data is None or text is None else _tokens(data, text, folder, context), device=device,
    )  # fmt: skip
    if html is not None:
        html.write_text(found.to_html(), encoding="utf-8")
    print(found.to_json() if json else found)


def _read(file: Path) -> str:
    """Reads the text of --data."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error.reason
        raise InvalidInput(f"--data {file} cannot be read: {why}; give a text file in UTF-8") from None


def _tokens(file: Path, text: str, folder: Path, context: int | None) -> list[torch.Tensor]:
    """The text's tokens, in pieces of the context; its bytes where a checkpoint of bytes has no tokenizer."""
    import torch

    from rooftile.engine.text.tokenizer import Tokenizer
    from rooftile.models.config import ModelConfig
    from rooftile.planning.make_plan import CONTEXT

    if (folder / "tokenizer.json").exists() or ModelConfig.from_folder(folder).vocab_size != 256:
        ids = Tokenizer.from_folder(folder).encode(text)
    else:
        ids = list(text.encode())
    length = min(CONTEXT, ModelConfig.from_folder(folder).max_len) if context is None else context
    pieces = torch.tensor(ids[:MOST_TOKENS]).split(length)
    found = [piece for piece in pieces if len(piece) > 1]
    if not found:
        raise InvalidInput(f"--data {file} has {len(ids)} tokens; must have at least two")
    return found
