"""A problem of HSTU attention: its numbers, and the tensors that say which rows belong to which user."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import Mask


class Problem(NamedTuple):
    """The numbers of a call. It holds no length, so a batch of other users is the same problem."""

    alpha: float
    scale: float | None  # None divides each user's rows by their number
    mask: Mask
    contextual: int
    zero: int  # the column of the table of positions for a distance of 0


class Users(NamedTuple):
    """The tensors of a call beside queries, keys and values. What is absent is None."""

    cu: Tensor  # (B + 1,) offsets of users
    targets: Tensor | None = None  # (B,) how many of each user's last rows are targets
    position_table: Tensor | None = None  # (1|H, P)
    time_table: Tensor | None = None  # (1|H, M)
    edges: Tensor | None = None  # (M - 1,) seconds at which the next bucket begins
    row_times: Tensor | None = None  # (total,)
    key_times: Tensor | None = None  # (total,)
    positions: Tensor | None = None  # (total,)


def encode_mask(mask: Mask) -> list[int]:
    """Returns a mask as integers, which cross an operator's schema: left, right, prefix and chunks, -1 for none."""
    return [-1 if n is None else n for n in (mask.left, mask.right, mask.prefix)] + list(mask.chunks)


def decode_mask(code: list[int]) -> Mask:
    """Returns the mask of `encode_mask`."""
    left, right, prefix = (None if n < 0 else n for n in code[:3])
    return Mask(left, right, prefix, tuple(code[3:]))


class Layout(NamedTuple):
    """How a user's rows lie: contextual ones, then the history, then targets; tensors or ints, of one user or many."""

    rows: Any
    contextual: int
    targets: Any

    @property
    def history_end(self) -> Any:
        """The first row that is a target."""
        return self.rows - self.targets


def sees(i: Tensor, j: Tensor, layout: Layout, mask: Mask) -> Tensor:
    """Whether row i of a user sees row j.

    Contextual rows are seen by all, and see all but targets. A row of the history sees the history by the mask, in which the
    first event has position 0. All targets have the position behind the history; each sees the history by the mask, and itself.
    """
    c, end = layout.contextual, layout.history_end
    place_i, place_j = torch.minimum(i, end * torch.ones_like(i)) - c, j - c
    in_mask = (place_j >= mask.first_key(place_i)) & (place_j <= mask.last_key(place_i))
    seen = (j < c) | (i < c) | in_mask
    there = (i < layout.rows) & (j < layout.rows)
    return there & torch.where(j < end, seen, i == j)
