"""Parts become one tensor: rounds joined by lse, and sums over rounds, groups and heads in a fixed order."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.gathered.kernels.shape import padded, store_lse, strides_of
from rooftile.approximate.gathered.lists import Slots
from rooftile.runtime.launch import Kernel

# numbers that a program holds
NUMBERS = 4096


@triton.jit(do_not_specialize=["T", "H", "rounds", "rows"])
def _join(
    parts_ptr, lses_ptr, v_ptr, o_ptr, lse_ptr, v_strides, T, H, group, rounds, rows, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """o and lse (B, T, H) of the rounds' parts; a row that no round shows a key gets its own value."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    dv = tl.arange(0, BLOCK_DV)
    mask = there[:, None] & (dv < DV)[None, :]
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for r in range(rounds):
        top = tl.maximum(top, tl.load(lses_ptr + 2 * (r * rows.to(tl.int64) + row), mask=there, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    o = tl.zeros((BLOCK, BLOCK_DV), tl.float32)
    for r in range(rounds):
        place = r * rows.to(tl.int64) + row
        lse = tl.load(lses_ptr + 2 * place, mask=there, other=float("-inf"))
        weight = tl.exp2(lse - top + tl.load(lses_ptr + 2 * place + 1, mask=there, other=0.0))
        total += weight
        o += weight[:, None] * tl.load(parts_ptr + place[:, None] * DV + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    sees_none = total == 0.0
    total = tl.where(sees_none, 1.0, total)
    t = row // H
    own = v_ptr + (t // T)[:, None] * v_strides[0] + (t % T)[:, None] * v_strides[1] + (row % H // group)[:, None] * v_strides[2]
    own = tl.load(own + dv[None, :], mask=mask & sees_none[:, None], other=0.0).to(tl.float32)
    o = o / total[:, None] + own
    tl.store(o_ptr + row[:, None] * DV + dv[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)
    store_lse(lse_ptr, row, tl.where(sees_none, float("-inf"), top), total, there)


@triton.jit(do_not_specialize=["rounds", "rows"])
def _add_rounds(
    parts_ptr, do_ptr, lse_ptr, out_ptr, rounds, rows, GROUP: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums (R, B, T, H GROUP, D) over rounds and the heads of a group: (B, T, H, D). OWN: and do of rows that saw nothing."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    d = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for r in range(rounds):
        for g in range(GROUP):
            place = (r * rows.to(tl.int64) + row) * GROUP + g
            total += tl.load(parts_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0)
    if OWN:
        for g in range(GROUP):
            place = row * GROUP + g
            alone = tl.load(lse_ptr + 2 * place, mask=there, other=0.0) == float("-inf")
            total += tl.load(do_ptr + place[:, None] * D + d[None, :], mask=mask & alone[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * D + d[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "H", "N", "rows"])
def _add_slots(
    parts_ptr, starts_ptr, entries_ptr, out_ptr, T, H, N, rows, GROUP: tl.constexpr, MEAN: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums parts (B, H GROUP, N, D) at the positions of each place, and over the heads of a group: (B, T, H, D)."""
    # row numbers have the shape (BLOCK, 1) from the start: Triton 3.6 fails to compile a loop of unknown length that gives them
    # this shape, because a load's mask and pointers then have different layouts
    row = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    there = row < rows
    t = row // H % T
    slice = (row // H // T * H + row % H) * GROUP
    d = tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    count = tl.zeros((BLOCK, 1), tl.int32)
    for g in range(GROUP):
        starts = starts_ptr + (slice + g) * (T + 1) + t
        start = tl.load(starts, mask=there, other=0)
        count = tl.load(starts + 1, mask=there, other=0) - start
        for n in range(tl.max(tl.max(count, 1), 0)):
            listed = n < count
            entry = tl.load(entries_ptr + (slice + g) * N + start + n, mask=listed, other=0)
            place = (slice + g) * N + entry
            part = tl.load(parts_ptr + place * D + d, mask=listed & (d < D), other=0.0)
            total += part.to(tl.float32)
    if MEAN:
        total = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(out_ptr + row * D + d, total.to(out_ptr.dtype.element_ty), mask=there & (d < D))


_start_join, _start_rounds, _start_slots = Kernel(_join), Kernel(_add_rounds), Kernel(_add_slots)


def join(parts: Tensor, lses: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, T, H, 2) from the o and lse of each round, which have one more axis in front."""
    R, _, T, H, Dv = parts.shape
    o, lse = parts.new_empty(parts.shape[1:]), lses.new_empty(lses.shape[1:])
    if lse.numel():
        block, constants = _constants(Dv, "V")
        rows = lse.numel() // 2
        numbers = (*strides_of(v), T, H, H // v.shape[2], R, rows)
        _start_join((-(-rows // block), 1, 1), (parts, lses, v, o, lse, *numbers), constants)
    return o, lse


def add_rounds(parts: Tensor, like: Tensor, do: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
    """The sum over the rounds of parts (R, B, T, H, D), and over the heads of a group, as `like` (B, T, Hk, D).

    With do and lse (B, T, H, 2) the rows with lse = -inf add their do: they have their own value as output.
    """
    out = like.new_empty(like.shape)
    if out.numel():
        block, constants = _constants(parts.shape[-1], "", ("GROUP", parts.shape[3] // like.shape[2]), ("OWN", do is not None))
        rows = like.shape[:3].numel()
        tensors = (parts, parts if do is None else do, parts if lse is None else lse, out)
        _start_rounds((-(-rows // block), 1, 1), (*tensors, parts.shape[0], rows), constants)
    return out


def add_slots(parts: Tensor, slots: Slots, like: Tensor, dim: int, mean: bool = False) -> Tensor:
    """The sum, or the mean over one head's positions, of parts (B, H, N, dim) for each place: (B, T, Hk, dim) for `like`."""
    B, T, H = like.shape[:3]
    out = like.new_empty(B, T, H, dim)
    if out.numel():
        block, constants = _constants(dim, "", ("GROUP", parts.shape[1] // H), ("MEAN", mean))
        numbers = (T, H, parts.shape[2], B * T * H)
        _start_slots((-(-B * T * H // block), 1, 1), (parts, slots.starts, slots.entries, out, *numbers), constants)
    return out


@cache
def _constants(dim: int, which: str, *others: tuple[str, int]) -> tuple[int, dict[str, int]]:
    """Rows of a program, and its compile-time arguments, which a launch knows by their identity."""
    block = max(NUMBERS // padded(dim), 1)
    sizes = {f"D{which}": dim, f"BLOCK_D{which}": padded(dim), "BLOCK": block}
    return block, dict(others) | sizes | {"num_warps": 4}
