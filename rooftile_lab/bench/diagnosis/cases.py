"""The twenty cases of programs that follow public ones: a script, its arguments, and the experiments that tell its main cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "public"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program."""

    name: str
    follows: str  # the public program
    script: str
    arguments: tuple[str, ...] = ()
    without: str = ""  # the part that an experiment leaves out
    part: str = ""  # the cause that its absence proves
    waits: bool = False  # for other processes: only the wall clock sees its time
    ranks: int = 1
    narrow: bool = False  # its products are in bf16, on a GPU too
    narrow_on_gpu: bool = False

    @property
    def path(self) -> Path:
        """The file of the script."""
        return FOLDER / f"{self.script}.py"


def _way(script: str, name: str) -> tuple[str, ...]:
    return ("--way", name)


CASES = {
    case.name: case
    for case in (
        Case(name="nanogpt", follows="nanoGPT", script="nanogpt", narrow_on_gpu=True),
        Case(name="nanogpt-compiled", follows="nanoGPT", script="nanogpt", arguments=("--compile",), narrow_on_gpu=True),
        Case(
            name="nanogpt-micro-batches", follows="nanoGPT", script="nanogpt", arguments=("--micro-batches", "4"),
            narrow_on_gpu=True,
        ),
        Case(name="trainer", follows="Transformers' Trainer", script="trainer"),
        Case(name="trainer-lora", follows="Trainer with PEFT", script="trainer", arguments=("--way", "lora")),
        Case(name="trainer-checkpointing", follows="Trainer", script="trainer", arguments=("--way", "checkpointing")),
        Case(name="trainer-autocast", follows="Trainer", script="trainer", arguments=("--way", "autocast"), narrow=True),
        Case(name="unet", follows="diffusers' training of a UNet", script="unet"),
        Case(
            name="resnet-loader", follows="PyTorch's ImageNet example", script="resnet", without="loader", part="input",
        ),
        Case(
            name="resnet-workers", follows="PyTorch's ImageNet example", script="resnet", arguments=("--workers", "2"),
            without="loader", part="input", waits=True,
        ),
        Case(name="lstm-by-hand", follows="word_language_model", script="lstm"),
        Case(name="graph", follows="pygcn", script="graph"),
        Case(name="embedding-bag", follows="PyTorch's text classification", script="embedding_bag"),
        Case(name="generate", follows="Transformers' generate", script="generate"),
        Case(name="gru-packed", follows="PyTorch's sequence labelling", script="gru"),
        Case(name="reinforce", follows="CleanRL", script="reinforce", without="environment", part="host"),
        Case(
            name="ddp", follows="PyTorch's DDP tutorial", script="ranks", arguments=("--way", "ddp"), without="exchange",
            part="communication", waits=True, ranks=2,
        ),
        Case(
            name="fsdp", follows="PyTorch's FSDP2 tutorial", script="ranks", arguments=("--way", "fsdp"), without="exchange",
            part="communication", waits=True, ranks=2,
        ),
        Case(name="recommender-nested", follows="TorchRec", script="recommender", arguments=("--way", "nested")),
        Case(name="recommender-offsets", follows="DLRM", script="recommender", arguments=("--way", "offsets")),
    )
}  # fmt: skip
