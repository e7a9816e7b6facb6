"""Lists of rows that attend to each other in groups, as the operator takes them, and how they are made from hashes or members.

A list holds the places of a sequence's rows in the order in which they are grouped: group g is the rows from g width on. There is
a list for each round, sequence and head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# each kind decides which pairs a group sees; RowLists.kind says how
KINDS = ("lists", "chunks", "window")


class RowLists(NamedTuple):
    """The lists of a call, as the kernels read them.

    kind: "lists": a group's queries see its keys. "chunks": they see the keys of their group and of the one before, the first
        group the keys of the last. "window": they see the keys from `lows` up to themselves in their order.
    causal: lists: the keys up to the query's own place. Others: the keys before it; without, all but itself.
    """

    rows: Tensor  # (R, B, H, N) int32, places of queries
    keys: Tensor  # (R, B, H, M) int32, places of keys
    marks: Tensor | None  # (R, R, B, H, N): [r, n] is the chunk, or the rank for a window, in round (r + n) % R; None: no N_ij
    lows: Tensor | None  # (R, R or 1, B, H, N): the lowest rank that a row sees in that round; None but for a window
    width: int
    key_width: int
    kind: str
    causal: bool

    @property
    def groups(self) -> int:
        """Groups in a list."""
        return max(-(-self.rows.shape[-1] // self.width), -(-self.keys.shape[-1] // self.key_width))

    @property
    def before(self) -> int:
        """How many groups before its own a query reads."""
        return int(self.kind != "lists" and self.groups > 1)

    @property
    def joins(self) -> bool:
        """Whether rounds are parts of one softmax; the groups of "lists" each have their own, and a row gets their mean."""
        return self.kind != "lists"


def from_hashes(
    hashes: Tensor, chunk: int, causal: bool, strict: bool, once: bool, buckets: int | None = None
) -> RowLists:  # fmt: skip
    """The lists of Reformer's rounds, from hashes (B, T, H, R), below `buckets` if it is known."""
    T, R = hashes.shape[1], hashes.shape[3]
    chunk = min(chunk, max(T, 1))
    values, order = sorted_rows(hashes.permute(3, 0, 2, 1), buckets)  # (R, B, H, T)
    ranks = torch.arange(T, device=hashes.device).expand_as(order)
    once = once and R > 1
    marks = lows = None
    if strict:
        begins = torch.nn.functional.pad(values[..., 1:] != values[..., :-1], (1, 0), value=True)
        low = torch.where(begins, ranks, 0).cummax(-1).values.clamp(min=ranks - chunk)
        lows = _by_round(torch.empty_like(order).scatter_(-1, order, low), order) if once else low.int()[:, None]
    if once:
        rank = torch.empty_like(order).scatter_(-1, order, ranks)  # the rank of each place
        marks = _by_round(rank if strict else rank // chunk, order)
    rows = order.int()
    return RowLists(rows, rows, marks, lows, chunk, chunk, "window" if strict else "chunks", causal)


def sorted_rows(x: Tensor, below: int | None = None) -> tuple[Tensor, Tensor]:
    """Keys row * below + x, which rise, of integers x (..., N), and the places of the numbers, equal ones as they came; int64.

    One sort of all rows: PyTorch sorts a few long rows on a GPU one after the other. With `below`, x is in [0, below), and keys
    have 32 bits where these suffice, which takes half the passes.
    """
    rows, N = x.shape[:-1].numel(), x.shape[-1]
    if below is None:
        x, below = x.int().long() + 2**31, 2**32
    dtype = torch.int32 if rows * below < 2**31 else torch.int64
    row = torch.arange(rows, device=x.device).view(*x.shape[:-1], 1)
    keys, order = (row.to(dtype) * below + x.to(dtype)).flatten().sort(stable=True)
    return keys.view(x.shape), order.view(x.shape) - row * N


def _by_round(x: Tensor, order: Tensor) -> Tensor:
    """A number of each place and round (R, B, H, T) in the orders of all rounds: [r, n] belongs to round (r + n) % R."""
    R = x.shape[0]
    return torch.stack([x.roll(-n, 0).gather(-1, order) for n in range(R)], dim=1).int().contiguous()


def from_members(queries: Tensor, keys: Tensor, causal: bool) -> RowLists:
    """The lists of clusters: places (B, H, c, w) of queries and (B, H, c, w') of keys."""
    rows, others = (x.int().flatten(2)[None].contiguous() for x in (queries, keys))
    return RowLists(rows, others, None, None, max(queries.shape[-1], 1), max(keys.shape[-1], 1), "lists", causal)


class Slots(NamedTuple):
    """The positions of a list by place: place t has `entries[starts[t]: starts[t + 1]]`, rising."""

    starts: Tensor  # (B, H, T + 1) int32
    entries: Tensor  # (B, H, N) int32


def slots_of(places: Tensor, length: int) -> Slots:
    """The positions at which each place stands in the lists (B, H, N)."""
    # places outside of the text stand before or after all others
    below = length + 2
    keys, entries = sorted_rows(places.clamp(-1, length) + 1, below)
    row = torch.arange(places.shape[:2].numel(), device=places.device).view(*places.shape[:2], 1)
    due = (row * below + 1 + torch.arange(length + 1, device=places.device)).to(keys.dtype)
    starts = torch.searchsorted(keys.flatten(), due.flatten()).view(due.shape) - row * places.shape[2]
    return Slots(starts.int(), entries.int())
