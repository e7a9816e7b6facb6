"""The kernels of the selected branch with other tiles and launches than a call takes, and choices to run them on.

random    every query chooses by itself
alike     the choices of 16 neighbours differ only in what is always chosen
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rooftile.approximate.native_sparse.selected import attend
from rooftile.approximate.native_sparse.selected.tiles import Tiles, queries_for
from rooftile.approximate.native_sparse.selection import choose_from
from rooftile_lab.bench.works import words_of_error

if TYPE_CHECKING:
    from rooftile.approximate.native_sparse.selected.kernels import KeyLists

KINDS = {"random": 1, "alike": 16}
# by rows of a tile: with fewer warps a head dim of 128 spills, as dk and dv do with fewer than four
WARPS = {16: (2, 4), 32: (4,), 64: (4,), 128: (8,)}
# bytes of the scores of a piece
PIECE = 1 << 28


class Sizes(NamedTuple):
    """One text of N tokens."""

    N: int
    H: int
    Hk: int
    D: int
    Dv: int
    block: int
    count: int  # type: ignore[assignment]  # a tuple's method

    @property
    def scale(self) -> float:
        return self.D**-0.5


@dataclass(frozen=True)
class Variant:
    """Queries of a tile, or of a step for dk and dv, and how a kernel is launched; the queries of a part of a long list."""

    queries: int
    warps: int
    stages: int
    each: int | None = None

    def __str__(self) -> str:
        return f"{self.queries} queries, {self.warps} warps, {self.stages} stages"


def variants(group: int, queries: Sequence[int] = (1, 2, 4), stages: Sequence[int] = (2, 3)) -> Iterator[Variant]:
    """All variants that are worth a compilation."""
    for count in queries:
        rows = max(1 << (count * group - 1).bit_length(), 16)
        for warps in WARPS.get(rows, ()):
            yield from (Variant(count, warps, n) for n in stages)


def choices(kind: str, sizes: Sizes, device: torch.device) -> Tensor:
    """Blocks (N, Hk, count) int32: random ones beside the first, the own and the one before."""
    run, blocks = KINDS[kind], -(-sizes.N // sizes.block)
    generator = torch.Generator(device).manual_seed(0)
    step = max(PIECE // (4 * sizes.Hk * blocks) // run, 1) * run
    found = []
    for start in range(0, sizes.N, step):
        stop = min(start + step, sizes.N)
        score = torch.rand(-(-(stop - start) // run), sizes.Hk, blocks, generator=generator, device=device)
        score = score.repeat_interleave(run, 0)[: stop - start]
        own = torch.arange(start, stop, device=device).div(sizes.block, rounding_mode="floor")
        found.append(choose_from(score[None], own[:, None, None], sizes.count, 1, 2)[0])
    return torch.cat(found)


class Prepared(NamedTuple):
    """The inputs of the kernels, and what their backward reads."""

    q: Tensor  # (N, H, D)
    k: Tensor  # (N, Hk, D)
    v: Tensor  # (N, Hk, Dv)
    do: Tensor  # (N, H, Dv)
    lse: Tensor  # (N, H)
    delta: Tensor  # (N, H)
    o: Tensor  # (N, H, Dv)
    chosen: Tensor  # (N, Hk, count)
    cu: Tensor  # (2,)
    scale: float
    block: int

    @classmethod
    def of(cls, kind: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
        """Random inputs, with the output that a call gives."""
        torch.manual_seed(0)
        shapes = ((sizes.H, sizes.D), (sizes.Hk, sizes.D), (sizes.Hk, sizes.Dv), (sizes.H, sizes.Dv))
        q, k, v, do = (torch.randn(sizes.N, *shape, device=device, dtype=dtype) for shape in shapes)
        cu = torch.tensor([0, sizes.N], dtype=torch.int32, device=device)
        chosen = choices(kind, sizes, device)
        from rooftile.approximate.native_sparse.selected import kernels

        tiles = kernels.unions(chosen, cu, cu, sizes.block, queries_for(sizes.H // sizes.Hk))
        o, lse = kernels.forward(q, k, v, tiles, sizes.scale, sizes.block)
        delta = (o.float() * do.float()).sum(-1)
        return cls(q, k, v, do, lse, delta, o, chosen, cu, sizes.scale, sizes.block)

    def tiles(self, variant: Variant) -> Tiles:
        from rooftile.approximate.native_sparse.selected import kernels

        return kernels.unions(self.chosen, self.cu, self.cu, self.block, variant.queries)

    def lists(self) -> KeyLists:
        from rooftile.approximate.native_sparse.selected import kernels

        return kernels.key_lists(self.chosen, self.cu, self.cu, self.k.shape[0], self.block)


def works(x: Prepared, variant: Variant, tiles: Tiles, lists: KeyLists) -> dict[str, Callable[[], Any]]:
    """The kernels of a variant, by their phase."""
    from rooftile.approximate.native_sparse.selected import kernels
    from rooftile.approximate.native_sparse.selected.kernels.shape import LaunchOptions

    # dq fills in the rests of rows, which dk and dv read
    known, launch = (x.do, x.lse, x.delta, torch.zeros_like(x.lse), x.q, x.k, x.v), LaunchOptions(variant.warps, variant.stages)
    return {
        "fwd": lambda: kernels.forward(x.q, x.k, x.v, tiles, x.scale, x.block, launch),
        "dq": lambda: kernels.dq(*known, tiles, x.scale, x.block, launch),
        "dkdv": lambda: kernels.dkdv(
            *known,
            lists,
            x.cu,
            x.cu,
            x.scale,
            x.block,
            LaunchOptions(max(variant.warps, 4), variant.stages),
            variant.each,
            variant.queries,
        ),
    }


def complaint(variant: Variant, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a variant must not be timed: it differs from plain operations on a short text. None if it does not."""
    x = Prepared.of("random", sizes, device, dtype)
    leaves = q, k, v = [each[None].float().requires_grad_() for each in (x.q, x.k, x.v)]
    due, _ = attend(q, k, v, x.chosen[None], block_size=x.block, scale=x.scale, backend="plain")
    gradients = torch.autograd.grad((due * x.do[None].float()).sum(), leaves)
    # so that the long lists of a short text have parts, too
    run = works(x, replace(variant, each=16), x.tiles(variant), x.lists())
    try:
        found = run["fwd"]()[0], run["dq"](), *run["dkdv"]()
    except Exception as stopped:
        # a launch may ask for more shared memory than there is, and the others should still be timed
        return f"failed: {words_of_error(stopped)}"
    for name, one, other in zip(("o", "dq", "dk", "dv"), found, (due, *gradients), strict=True):
        error = ((one.float() - other[0]).norm() / other.norm()).item()
        # rounding to 16 bits is a few thousandths
        if not error < 0.02:
            return f"{name} differs from plain operations by {error:.3g} of its norm"
    return None


def read_bytes(x: Prepared, tiles: Tiles) -> tuple[float, float]:
    """Blocks of a tile's union on average, and the bytes of keys and values that all tiles read through the L2 cache."""
    entries = int(tiles.counts.sum())
    line = (x.k.shape[2] + x.v.shape[2]) * x.k.element_size()
    return entries / tiles.counts.numel(), float(entries * x.block * line)
