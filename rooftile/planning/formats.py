"""The formats that a plan chooses among, and the bytes of a weight in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.dtypes import WORDS
from rooftile.weights import weight_format
from rooftile.weights.files.formats import SPARSE, check_word
from rooftile.weights.formats import ROW, TILE, group_of, parsed

# a layer as it is, whatever its dtype
KEPT = "bf16"
DEFAULT = (KEPT, "fp8", "int8", "int4")

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_formats(formats: Sequence[str] | str | None, *, backward: bool, counts_losses: bool) -> tuple[str, ...]:
    """Returns the formats, each once; None stands for the default formats.

    counts_losses: whether losses are bounded; where they are not, 2:4 is no default format.

    Raises:
        InvalidInput: a format is no word of `rooftile.quantise_weight`, nor "bf16" or "2:4".
        Unsupported: a format is 2:4, in training.
    """
    # masks without training lose far more than rounding: a choice by time alone would take them wherever they are fast
    default = (*DEFAULT, SPARSE) if counts_losses and not backward else DEFAULT
    if formats is not None and not isinstance(formats, Iterable):
        raise InvalidInput(f"formats is {formats!r}; must be names of formats, such as ('bf16', 'int4:32')")
    words = default if formats is None else (formats,) if isinstance(formats, str) else tuple(formats)
    words = tuple(KEPT if str(word).removeprefix("torch.") in WORDS[KEPT] else word for word in words)
    if not words:
        raise InvalidInput(f"formats is {formats!r}; must name at least one, such as {', '.join(map(repr, DEFAULT))}")
    for word in words:
        if word == SPARSE and backward:
            raise Unsupported(f"formats has {word!r}, and plans of training round alone; leave it out, or plan without backward")
        check_word(word, KEPT)
    return tuple(dict.fromkeys(words))


def weight_bytes(N: int, K: int, word: str, itemsize: int) -> int:
    """Counts the bytes of a weight (N, K) with its scales, whose numbers have `itemsize` bytes as it is."""
    if word == KEPT:
        return N * K * itemsize
    if word == SPARSE:
        # half of the numbers, and two bits for the place of each, in whole bytes
        return N * (K * itemsize // 2 + -(-K // 8))
    format, group_given = parsed(word)
    kind = weight_format(format)
    codes = N * -(-K * kind.bits // 8)
    if format == "fp8_tile":
        return codes + 4 * -(-N // TILE) * -(-K // TILE)
    group = K if group_given == ROW else group_of(kind, K, group_given)
    scale = 4 if kind.activations is not None else 1 if kind.has_exponents or format == "nvfp4" else 2
    return codes + scale * N * (K // group) + 4 * (format == "nvfp4")
