"""Launches the kernels of a search: column maxima, bounds, what reaches them, the choice, and a walk for candidates without room.

No launch waits for another's numbers: the last walk finds nothing to do but for candidates that `choose` left unfinished.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.recommend.target.kernels.outputs import processors
from rooftile.recommend.target.kernels.search.bounds import find_bounds, find_maxima
from rooftile.recommend.target.kernels.search.choosing import choose
from rooftile.recommend.target.kernels.search.collecting import collect
from rooftile.recommend.target.kernels.search.scores import Shape
from rooftile.recommend.target.kernels.search.walk import walk
from rooftile.recommend.target.kernels.shape import slots
from rooftile.recommend.target.search.problem import KINDS, Search

# events per tile, and the columns of a part of a history
KEYS = 128
# the pairs of a part that there is room for beyond k: a tile of equal scores
MARGIN = KEYS
# candidates of the last walk, and of a sort
WALKED, SORTED = 16, 4
# the most parts of a history, and the least tiles that one has to be worth a program
MOST_PARTS, LEAST_TILES = 16, 4
# the numbers of a program that looks for bounds
COLUMNS = 4096


class Plan(NamedTuple):
    """The compile-time arguments of each kernel, by which a launch is recognised."""

    rows: int  # candidates per program of the two walks
    spec: Shape
    walks: dict[str, Any]
    bounds: dict[str, Any]
    choice: dict[str, Any]
    last: dict[str, Any]


def search(given: Search) -> Tensor:
    """Returns the events that are chosen, (total_q, 1|H, k) int32: places in the user's history, the best first, -1 for none."""
    q, keys, bias, k = given.q, given.keys, given.bias, given.k
    q, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys))
    total, H = q.shape[:2]
    found = torch.empty((total, given.heads, k), dtype=torch.int32, device=q.device)
    if not found.numel():
        return found
    plan = plan_of(given)
    spec, lists = plan.spec, total * given.heads
    offsets = cu_q, cu = given.cu_q.contiguous(), given.cu.contiguous()
    B = cu.shape[0] - 1
    counts = torch.zeros(lists * spec.PARTS, dtype=torch.int32, device=q.device)
    bounds = torch.empty(lists, dtype=torch.int32, device=q.device)
    buffer = torch.empty(lists * spec.PARTS * spec.ROOM, dtype=torch.int64, device=q.device)
    bias_strides = (0, 0) if bias is None else (bias.stride(0), 0 if bias.shape[1] == 1 else bias.stride(1))
    sources = (q, keys, cu if bias is None else bias, *offsets)
    strides = ((q.stride(0), q.stride(1)), (keys.stride(0), keys.stride(1)), bias_strides)
    sizes, group = (B, H, given.heads), H // keys.shape[1]
    grid = (slots(cu_q, total, plan.rows) * given.heads, spec.PARTS, 1)
    if given.kind != "category":
        maxima = torch.empty(lists * spec.PARTS * KEYS, dtype=torch.int32, device=q.device)
        find_maxima(grid, (*sources, maxima, *strides, *sizes, group, given.scale), plan.walks)
        find_bounds((-(-lists // plan.bounds["ROWS"]), 1, 1), (maxima, bounds, lists, k), plan.bounds)
    collect(grid, (*sources, bounds, counts, buffer, *strides, *sizes, k, group, given.scale), plan.walks)
    choose((-(-lists // SORTED), 1, 1), (counts, bounds, buffer, found, lists, k), plan.choice)
    grid = (slots(cu_q, total, WALKED) * given.heads, 1, 1)
    walk(grid, (*sources, found, buffer, *strides, *sizes, k, group, given.scale), plan.last)
    return found


def plan_of(given: Search) -> Plan:
    """The tiles of a search, and the parts of its histories: as many as make enough columns, more if processors are left over."""
    q, keys, k = given.q, given.keys, given.k
    total, H, D = q.shape
    wide = q.element_size() == 4 and given.kind == "exact"
    rows = 64 if given.kind == "exact" and not wide else 32
    parts = -(-2 * k // KEYS)
    if not given.deterministic:
        programs = slots(given.cu_q, total, rows) * given.heads
        tiles = keys.shape[0] // max(given.cu.shape[0] - 1, 1) // KEYS
        parts = max(parts, min(2 * processors(q.device) // programs, tiles // LEAST_TILES))
    parts = min(1 << (parts - 1).bit_length(), MOST_PARTS)
    # Triton's interpreter and AMD's chips have no PTX
    ptx = q.is_cuda and torch.version.hip is None
    flags = (not given.per_head and H > 1, given.bias is not None, wide, ptx)
    return _plan(KINDS.index(given.kind), D, k, rows, parts, MARGIN, flags)


@cache
def _plan(kind: int, D: int, k: int, rows: int, parts: int, margin: int, flags: tuple[bool, ...]) -> Plan:
    summed, bias, wide, ptx = flags
    kept = max(64, 1 << (k - 1).bit_length())
    block = min(max(16, 1 << (D - 1).bit_length()), 32 if wide else 128)
    held = kind == 0 and block >= D and not summed
    spec = Shape(
        kind,
        D,
        block,
        held,
        rows,
        KEYS,
        2 if wide else 3,
        kept,
        parts,
        kept + margin,
        summed,
        bias,
        "ieee" if wide else "tf32",
        ptx,
    )
    columns = parts * KEYS
    return Plan(
        rows,
        spec,
        # two programs on a processor
        {"SPEC": spec, "num_warps": 8} | ({"maxnreg": 128} if held and ptx and not wide else {}),
        {"ROWS": max(COLUMNS // columns, 1), "COLUMNS": columns, "FLOATS": kind == 0, "num_warps": 4},
        {"ROWS": SORTED, "SPEC": spec, "num_warps": max(kept // 128, 1)},
        {"ROWS": WALKED, "SPEC": spec, "num_warps": 4 if kept <= 128 and not wide else 8},
    )
