"""Portions of the work: some key heads of one sequence, with the query heads that share them.

The queries, keys and values of a portion are copied once into contiguous strips in the dtype of the computation, scaled and
free of NaN. So only a few heads at a time are widened from half precision, and no key or value is ever repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.tiled.listed import Listed
from rooftile.exact.backends.tiled.tiles import Tile, heads_for, hidden_pairs, key_tiles, query_tiles
from rooftile.exact.blocks import Blocks
from rooftile.exact.places import Place, places_of
from rooftile.exact.reference.nonfinite import all_finite, seeing_keys, seen_by_rows, set_aside
from rooftile.exact.reference.philox import keep_mask
from rooftile.exact.spec import Options, Spec


class HeadSlice(NamedTuple):
    """The place of a portion in a call's tensors. Every method returns a view, to read or write."""

    b: int  # the sequence
    rows: slice | int  # rows of packed queries, or the sequence again
    keys: slice | int
    S: int
    h: int  # its first key head
    h_stop: int
    group: int

    @property
    def query_heads(self) -> slice:
        return slice(self.h * self.group, self.h_stop * self.group)

    def of_queries(self, x: Tensor) -> Tensor:
        """Views a tensor laid out like q as (heads, group, T, D)."""
        return x[self.rows, ..., self.query_heads, :].unflatten(-2, (-1, self.group)).permute(1, 2, 0, 3)

    def of_keys(self, x: Tensor) -> Tensor:
        """Views a tensor laid out like k as (heads, S, D)."""
        return x[self.keys, ..., self.h : self.h_stop, :].transpose(0, 1)

    def of_rows(self, x: Tensor) -> Tensor:
        """Views a tensor laid out like lse as (heads, group, T)."""
        x = x[self.rows] if isinstance(self.rows, int) else x[:, self.rows]
        return x[self.query_heads].unflatten(0, (-1, self.group))

    def of_heads(self, x: Tensor) -> Tensor:
        """Views one number per query head as (heads, group)."""
        return x[self.query_heads].unflatten(0, (-1, self.group))

    def of_bias(self, x: Tensor) -> Tensor:
        """Views a tensor laid out like bias as (1 | heads, 1 | group, 1 | T, 1 | S)."""
        if x.ndim == 4:
            x = x[self.b if x.shape[0] > 1 else 0]
        elif x.shape[1] > 1:
            x = x[:, self.rows]
        x = x[..., : self.S]
        return x[:, None] if x.shape[0] == 1 else self.of_heads(x)


@dataclass(slots=True)
class Heads:
    """One portion: G query heads for each of its key heads."""

    spec: Spec
    place: HeadSlice
    q: Tensor  # (heads, G, T, D), times scale
    k: Tensor  # (heads, S, D)
    v: Tensor  # (heads, S, Dv)
    lost: tuple[Tensor, Tensor, Tensor] | None  # marks where q, k and v were not finite
    bias: Tensor | None  # (1 | heads, 1 | G, 1 | T, 1 | S)
    slopes: Tensor | None  # (heads, G, 1, 1)
    sinks: Tensor | None  # (heads, G)
    seed: Tensor | None
    listed: Listed | None
    first: Place  # the place of query and key 0 of head 0 in the random draw
    offset: int  # query 0 minus key 0 in distances

    @property
    def T(self) -> int:
        return self.q.shape[2]

    @property
    def S(self) -> int:
        return self.k.shape[1]

    def rows(self, x: Tensor, t: int, t_stop: int) -> Tensor:
        """Returns the rows [t, t_stop) of (heads, G, T, ...) with the query heads of a key head stacked: (heads, G * rows, C)."""
        return x[:, :, t:t_stop].reshape(x.shape[0], x.shape[1] * (t_stop - t), -1)

    def scores(self, q: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Computes a tile of scores (heads, G * rows, keys), -inf where hidden; with a softcap also tanh(scores / softcap)."""
        x = torch.bmm(q, self.k[:, tile.s : tile.s_stop].mT)
        capped = None
        if self.spec.softcap:
            capped = torch.tanh(x.div_(self.spec.softcap))
            x = capped * self.spec.softcap
        shaped = self.unstacked(x, tile)
        if self.bias is not None:
            shaped.add_(_part(self.bias, tile))
        if self.slopes is not None:
            i = torch.arange(tile.t, tile.t_stop)[:, None] + self.offset
            distance = (i - torch.arange(tile.s, tile.s_stop)).abs().to(x.dtype)  # (rows, keys)
            shaped.addcmul_(self.slopes, distance, value=-1)
        if tile.partial:
            shaped.masked_fill_(self.hidden(tile), -torch.inf)
        return x, capped

    def query_tiles(self) -> Iterator[tuple[int, int]]:
        """Yields the tiles of queries."""
        return query_tiles(self.T, self.spec.group) if self.listed is None else self.listed.query_tiles(self.T, self.spec.group)

    def key_tiles(self, t: int, t_stop: int) -> Iterator[Tile]:
        """Yields the tiles of queries [t, t_stop) that hold a visible pair."""
        tiles = key_tiles if self.listed is None else self.listed.key_tiles
        return tiles(self.spec.mask, t, t_stop, self.T, self.S)

    def hidden(self, tile: Tile) -> Tensor:
        """Marks the hidden pairs of a tile: booleans that broadcast to (heads, G, rows, keys)."""
        hidden = hidden_pairs(self.spec.mask, tile, self.T, self.S)
        return hidden if self.listed is None else hidden | self.listed.hidden(tile)

    def seen_by_rows(self, lost: Tensor) -> Tensor:
        """Marks the rows that see a lost key: booleans, keys (heads, S, C) to rows (heads, 1|G, T, C)."""
        if self.listed is None:
            return seen_by_rows(lost, self.spec.mask, self.T)[:, None]
        found = torch.zeros(*self.q.shape[:3], lost.shape[-1], dtype=torch.bool)
        for tile, sees in self._visible():
            seen = torch.einsum("hgts,hsc->hgtc", sees, lost[:, tile.s : tile.s_stop].to(sees.dtype)) > 0
            found[:, :, tile.t : tile.t_stop] |= seen
        return found

    def seeing_keys(self, lost: Tensor) -> Tensor:
        """Marks the keys that a lost row sees: booleans, rows (heads, G, T, C) to keys (heads, S, C)."""
        if self.listed is None:
            return seeing_keys(lost, self.spec.mask, self.S).any(1)
        found = torch.zeros(self.k.shape[0], self.S, lost.shape[-1], dtype=torch.bool)
        for tile, sees in self._visible():
            seen = torch.einsum("hgts,hgtc->hsc", sees, lost[:, :, tile.t : tile.t_stop].to(sees.dtype)) > 0
            found[:, tile.s : tile.s_stop] |= seen
        return found

    def see_a_key(self) -> Tensor:
        """Marks the rows that see a key: booleans that broadcast to (heads, G, T, 1)."""
        return self.seen_by_rows(torch.ones(self.k.shape[0], self.S, 1, dtype=torch.bool))

    def _visible(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yields the tiles with their visible pairs, 1 or 0, (heads, G, rows, keys)."""
        for t, t_stop in self.query_tiles():
            for tile in self.key_tiles(t, t_stop):
                shape = (*self.q.shape[:2], t_stop - t, tile.s_stop - tile.s)
                yield tile, (~self.hidden(tile)).to(self.q.dtype).expand(shape)

    def unstacked(self, x: Tensor, tile: Tile) -> Tensor:
        """Views (heads, G * rows, keys) as (heads, G, rows, keys)."""
        return x.unflatten(1, (self.spec.group, tile.t_stop - tile.t))

    def kept(self, tile: Tile) -> Tensor:
        """Returns the dropout factors of a tile's weights: 0 or 1 / (1 - dropout), (heads, G * rows, keys)."""
        first, heads = self.first, self.place.query_heads
        kept = keep_mask(
            self.seed,
            self.spec.dropout,
            torch.tensor(first.batch),
            first.head + torch.arange(heads.start, heads.stop)[:, None, None],
            first.query + torch.arange(tile.t, tile.t_stop)[:, None],
            first.key + torch.arange(tile.s, tile.s_stop),
        )  # (heads * G, rows, keys)
        return kept.view(self.k.shape[0], -1, tile.s_stop - tile.s) * self.q.new_tensor(1 / (1 - self.spec.dropout))

    def add_to_bias(self, dbias: Tensor, dx: Tensor, tile: Tile) -> None:
        """Adds the gradient of a tile's scores to the bias's gradient, summed over its broadcast axes."""
        part = _part(dbias, tile)
        part.add_(self.unstacked(dx, tile).sum_to_size(part.shape))


def blocks(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> Iterator[Heads]:
    """Yields a call's portions, sequence by sequence."""
    if spec.layout == "packed":
        ends_q, ends_k = options.cu_q.tolist(), options.cu_k.tolist()
        sequences = [(slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])) for b in range(len(ends_q) - 1)]
    else:
        sequences = [(b, b) for b in range(q.shape[0])]
    Hk = k.shape[-2]
    for b, (rows, keys) in enumerate(sequences):
        T, S = q[rows].shape[0], k[keys].shape[0]
        step = heads_for(spec.group, T, S, Hk)
        if options.block_counts is not None and options.block_counts.shape[1] > 1:
            # together, heads would compute every block that one of them lists
            step = 1
        for h in range(0, Hk, step):
            place = HeadSlice(b, rows, keys, S, h, min(h + step, Hk), spec.group)
            yield _heads(q, k, v, options, spec, place)


def strip(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous copy in a dtype."""
    return torch.empty(x.shape, dtype=dtype).copy_(x)


def _heads(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec, place: HeadSlice) -> Heads:
    wide = torch.promote_types(spec.dtype, torch.float32)
    strips = [strip(x, wide) for x in (place.of_queries(q), place.of_keys(k), place.of_keys(v))]
    lost = None
    if not all_finite(*strips):
        strips, lost = zip(*(set_aside(x) for x in strips), strict=True)
    bias, alibi, sinks = options.bias, options.alibi, options.sinks
    if alibi is not None:
        alibi = alibi[place.b] if alibi.ndim == 2 else alibi
        alibi = place.of_heads(alibi).to(wide)[..., None, None]
    first, offset = Place(place.b, 0, 0, 0), strips[1].shape[1] - strips[0].shape[2]
    if spec.placed:
        first = Place(*places_of(options.seed)[place.b].tolist())
        offset = first.query - first.key
    return Heads(
        spec=spec,
        place=place,
        q=strips[0].mul_(spec.scale),
        k=strips[1],
        v=strips[2],
        lost=lost,
        bias=None if bias is None else place.of_bias(bias),
        slopes=alibi,
        sinks=None if sinks is None else place.of_heads(sinks).to(wide),
        seed=options.seed,
        listed=None if spec.block_size is None else _listed(options, spec, place, k.shape[-2]),
        first=first,
        offset=offset,
    )


def _listed(options: Options, spec: Spec, place: HeadSlice, Hk: int) -> Listed:
    blocks = Blocks(options.block_counts, options.block_indices, spec.block_size, options.block_bits)
    if isinstance(place.rows, slice):
        # packed: a place for each block of the sequence
        first = place.rows.start // spec.block_size[0] + place.b
        blocks = blocks.of_slots(first, first - (place.rows.start - place.rows.stop) // spec.block_size[0])
    elif blocks.counts.shape[0] > 1:
        blocks = blocks.of_sequence(place.b)
    return Listed.of(blocks, slice(place.h, place.h_stop), spec.group, Hk, place.S)


def _part(x: Tensor, tile: Tile) -> Tensor:
    """Returns a tile's part of a tensor laid out like the bias."""
    if x.shape[-2] > 1:
        x = x[..., tile.t : tile.t_stop, :]
    if x.shape[-1] > 1:
        x = x[..., tile.s : tile.s_stop]
    return x
