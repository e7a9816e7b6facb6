"""The options of a part of a split sequence: its rows and columns of a bias, its slopes, and its place in the random draw.

A weight is dropped by its batch row, head, query and key in the whole problem, and ALiBi counts distances there. So each part
carries its place (`rooftile.exact.places`), and all parts together have one device's draw.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact import validate as checks
from rooftile.exact.places import Place, with_places
from rooftile.exact.spec import Options
from rooftile.parallel.layouts import Range
from rooftile.runtime.ranks import Grid, Ranks, broadcast


class Start(NamedTuple):
    """The beginning of a part of a sequence: the sequence's number in its pack, and the part's first query and key in it."""

    sequence: int
    query: int
    key: int


def agreed_seed(seed: Any, dropout: float, device: torch.device, ranks: Ranks | Grid) -> Tensor | None:
    """Returns the seed (1,) of a dropout, the same on every rank; None without dropout.

    Without a seed every rank draws one from PyTorch's generator, as one device would, and takes the first rank's. So generators
    that were alike stay alike, and those that were not do no harm.
    """
    found = checks.check_seed(seed, dropout, device)
    if found is not None and seed is None:
        broadcast(ranks, found)
    return found


def of_part(
    options: Options, starts: tuple[Start, ...], rows: Range, columns: Range, heads: slice, first_head: int, q: Tensor
) -> Options:
    """Returns the options of a call over a part.

    Args:
        options: of this rank's tokens.
        starts: the beginnings of the part's sequences.
        rows: the part's queries among this rank's tokens.
        columns: the keys of the part's longest sequence, counted within the sequence.
        heads: the part's heads among this rank's.
        first_head: the head of the whole problem that is this rank's first.
        q: the part's queries, dense or packed.
    """
    alibi = options.alibi
    if alibi is not None:
        # slopes of the sequences of a pack, and of its parts
        if alibi.ndim == 2 and (q.ndim == 3 or alibi.shape[0] != q.shape[0]):
            alibi = torch.stack([alibi[start.sequence] for start in starts])
        alibi = alibi[..., heads]
    seed = options.seed
    if seed is not None or alibi is not None:
        batch = q.shape[0] if q.ndim == 4 else 1
        places = tuple(
            Place(b + start.sequence, first_head + heads.start, start.query, start.key) for start in starts for b in range(batch)
        )
        seed = with_places(seed, places, q.device)
    bias = None if options.bias is None else part_of_bias(options.bias, rows, columns)
    return Options(bias, alibi, None if options.sinks is None else options.sinks[heads], seed)


def part_of_bias(bias: Tensor, rows: Range, columns: Range) -> Tensor:
    """Returns rows and columns of a bias (..., rows of this rank or 1, all keys or 1); what is broadcast stays so."""
    if bias.shape[-2] > 1:
        bias = bias[..., slice(*rows), :]
    return bias[..., slice(*columns)] if bias.shape[-1] > 1 else bias
