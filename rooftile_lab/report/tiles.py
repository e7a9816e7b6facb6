"""The tiles that a kernel computes, masks and skips under each mask, and its time beside PyTorch's SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import rooftile
from rooftile.exact import masks
from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window
from rooftile.hardware.clock import clock_for
from rooftile.runtime.devices import arch
from rooftile_lab.report.plan import Plan
from rooftile_lab.report.spread import spread_of


class Visit(NamedTuple):
    """One tile that is computed: queries [t, t_stop) against keys [s, s_stop)."""

    t: int
    t_stop: int
    s: int
    s_stop: int
    is_masked: bool  # some of its pairs are hidden, so the mask is applied


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMap:
    """The tiles of a mask over N queries and N keys."""

    mask: str
    N: int
    visits: tuple[Visit, ...]
    full_visits: int  # tiles of attention without a mask
    visible_pairs: int
    forward_us: float
    sdpa_us: float  # PyTorch's SDPA under the same mask, as a boolean matrix where it has no word for it
    forward_spread: float = 0.0  # as in `rooftile_lab.report.spread`
    sdpa_spread: float = 0.0

    @property
    def masked(self) -> int:
        return sum(visit.is_masked for visit in self.visits)

    @property
    def skipped(self) -> int:
        return max(self.full_visits - len(self.visits), 0)

    @property
    def saved(self) -> float:
        """The fraction of the N x N scores that is never computed."""
        computed = sum((visit.t_stop - visit.t) * (visit.s_stop - visit.s) for visit in self.visits)
        return 1 - computed / self.N**2

    def json(self) -> dict[str, object]:
        """Returns the counts, without the list of tiles."""
        return {
            "mask": self.mask, "N": self.N, "computed": len(self.visits), "masked": self.masked, "skipped": self.skipped,
            "saved": self.saved, "visible_pairs": self.visible_pairs, "forward_us": self.forward_us, "sdpa_us": self.sdpa_us,
            "forward_spread": self.forward_spread, "sdpa_spread": self.sdpa_spread,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineStep:
    """The running values of one row's softmax after a tile."""

    scores: tuple[float, ...]  # scores of the tile
    largest: float
    rescale: float  # the factor of the sum so far
    sum: float  # sum of exp(score - largest)


def online_softmax(tiles: tuple[tuple[float, ...], ...]) -> list[OnlineStep]:
    """Processes one row of scores tile by tile, as the kernels do.

    >>> [round(step.sum, 3) for step in online_softmax(((1.0, 2.0), (4.0, 0.0)))]
    [1.368, 1.203]
    """
    largest, total = -math.inf, 0.0
    steps = []
    for scores in tiles:
        raised = max(largest, *scores)
        rescale = math.exp(largest - raised)
        total = total * rescale + sum(math.exp(score - raised) for score in scores)
        largest = raised
        steps.append(OnlineStep(scores=scores, largest=largest, rescale=rescale, sum=total))
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The example masks on one backend."""

    backend: str
    block_t: int
    block_s: int
    maps: tuple[TileMap, ...]

    @property
    def window(self) -> TileMap:
        """The example that the page leads with: a causal window."""
        return self.maps[-1]

    def json(self) -> dict[str, object]:
        """Returns the counts of every mask."""
        sizes = {"backend": self.backend, "block_t": self.block_t, "block_s": self.block_s}
        return {**sizes, "maps": [tile_map.json() for tile_map in self.maps]}


def examples(N: int) -> tuple[Mask, ...]:
    """Returns one mask of each kind, sized for a length."""
    eighth = N // 8
    return FULL, CAUSAL, Window(eighth, eighth), Prefix(3 * eighth), Chunk(2 * eighth), CAUSAL & Window(eighth)


def tile_masks(plan: Plan, device: str, on_step: Callable[[float, str], None]) -> Tiling:
    """Counts the tiles of each example and times it; on_step is called with the fraction done and the next step."""
    N = plan.tile_length
    backend = "tiled" if device == "cpu" else "triton"
    block_t, block_s = _blocks(plan, device)
    walks = {mask: tuple(_walk(backend, mask, N, block_t, block_s)) for mask in examples(N)}
    times = _forward_us(plan, backend, device, on_step)
    maps = [
        TileMap(
            mask=str(mask),
            N=N,
            visits=visits,
            full_visits=len(walks[FULL]),
            visible_pairs=masks.pairs(mask, N, N),
            forward_us=median(times[mask][0]),
            sdpa_us=median(times[mask][1]),
            forward_spread=spread_of(times[mask][0]),
            sdpa_spread=spread_of(times[mask][1]),
        )
        for mask, visits in walks.items()
    ]
    return Tiling(backend=backend, block_t=block_t, block_s=block_s, maps=tuple(maps))


def _walk(backend: str, mask: Mask, N: int, block_t: int, block_s: int) -> Iterator[Visit]:
    return tiled_walk(mask, N) if backend == "tiled" else aligned_walk(mask, N, block_t, block_s)


def aligned_walk(mask: Mask, N: int, block_t: int, block_s: int) -> Iterator[Visit]:
    """Yields the tiles of a grid that hold a visible pair, in the order of the GPU kernels."""
    for t in range(0, N, block_t):
        t_stop = min(t + block_t, N)
        start, stop = masks.key_range(mask, t, t_stop, N, N)
        for s in range(start // block_s * block_s, stop, block_s):
            s_stop = min(s + block_s, N)
            yield Visit(t, t_stop, s, s_stop, not masks.sees_all(mask, t, t_stop, s, s_stop, N, N))


def tiled_walk(mask: Mask, N: int) -> Iterator[Visit]:
    """Yields the tiles of the CPU backend."""
    from rooftile.exact.backends.tiled.tiles import key_tiles, query_tiles

    for t, t_stop in query_tiles(N, 1):
        for tile in key_tiles(mask, t, t_stop, N, N):
            yield Visit(*tile)


def _blocks(plan: Plan, device: str) -> tuple[int, int]:
    if device == "cpu":
        from rooftile.exact.backends.tiled.tiles import KEYS, ROWS

        return ROWS, KEYS
    from rooftile.exact.backends.triton.tiles import forward_tile

    tile = forward_tile(_case(plan, FULL).problem(arch(torch.device(device)), needs_grad=False).spec)
    return tile.BLOCK_T, tile.BLOCK_S


def _case(plan: Plan, mask: Mask) -> Case:
    N = plan.tile_length
    return Case(
        name="report-mask", tags=frozenset(), B=plan.batch, T=N, S=N, H=plan.heads, Hk=plan.heads, dim=plan.dim,
        dtype=plan.dtype, mask=mask,
    )  # fmt: skip


def _forward_us(
    plan: Plan, backend: str, device: str, on_step: Callable[[float, str], None]
) -> dict[Mask, tuple[list[float], list[float]]]:
    """Measures the times of a forward under each example, Rooftile's and SDPA's, in turns."""
    masks_here = examples(plan.tile_length)
    inputs = _case(plan, FULL).inputs(device)
    clock = clock_for(torch.device(device))
    works = {
        mask: (lambda mask=mask: rooftile.attention(*inputs.tensors, mask, backend=backend), _sdpa(inputs.tensors, mask))
        for mask in masks_here
    }
    taken: dict[Mask, tuple[list[float], list[float]]] = {mask: ([], []) for mask in masks_here}
    for turn in range(1 + plan.rounds):
        for n, mask in enumerate(masks_here):
            on_step((turn + n / len(masks_here)) / (1 + plan.rounds), f"{mask} attention, {plan.tile_length:,} tokens")
            for work, found in zip(works[mask], taken[mask], strict=True):
                samples = clock.samples(work)
                # the first turn has cold caches, or compiles
                found += samples if turn else []
    return taken


def _sdpa(tensors: Sequence[Tensor], mask: Mask) -> Callable[[], Tensor]:
    """Returns PyTorch's SDPA on the same tensors, called as its users would call it."""
    q, k, v = (x.transpose(1, 2) for x in tensors)
    if mask in (FULL, CAUSAL):
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=mask == CAUSAL)
    visible = masks.materialise(mask, q.shape[2], k.shape[2], q.device)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=visible)
