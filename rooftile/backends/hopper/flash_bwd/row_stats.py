"""What the backward needs of each row: its lse in units of log2, and

    D_i = sum_c dO_ic O_ic - dL_i             dL is the gradient that comes in through lse: dS = P (dP - D) then carries it

A row that sees nothing gets lse = +inf: exp(x - inf) is 0, so it weighs nothing. Each sequence is padded to a multiple of
128 with such rows, packed ones too: the copy engine cannot begin at any word of a line, only at one of four. And where dq is
added up in memory, the zeros that its sum begins with.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.backends.hopper.device.config import LOG2E
from rooftile.backends.hopper.device.scheduler import PADDED, packed_tile
from rooftile.backends.hopper.flash_bwd import dq_accumulator
from rooftile.backends.hopper.gluon import gl, gluon
from rooftile.backends.hopper.tiles import padded
from rooftile.launch import Kernel

ROWS = gl.constexpr(32)


class Words(NamedTuple):
    """A word a row, of (B, H, padded T) or packed (H, padded total) rows."""

    lse: Tensor
    delta: Tensor
    # delta in the shape of lse, for the gradient of sinks; both words in one, for a repair, and an int32 that asks for it
    rows: Tensor | None
    stats: Tensor | None
    lost: Tensor | None
    # zeros to add dq to (see `work`)
    sum_of_dq: Tensor | None

    @property
    def padded_T(self) -> int:
        return self.lse.shape[-1]


@gluon.jit
def _word(lse, delta):
    """Both words in one of 64 bits, lse above."""
    low = delta.to(gl.uint32, bitcast=True).to(gl.uint64)
    high = lse.to(gl.uint32, bitcast=True).to(gl.uint64)
    return ((high << 32) | low).to(gl.int64, bitcast=True)


# fmt: off
@gluon.jit(
    do_not_specialize=[
        "o_unit_b", "o_unit_t", "o_unit_h", "do_unit_b", "do_unit_t", "do_unit_h", "B", "H", "T", "padded_T",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "cu_ptr"],
)
def row_words_of(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, words_ptr, delta_ptr, rows_ptr, stats_ptr, nan_flag_ptr, sum_ptr, cu_ptr,
    o_unit_b, o_unit_t, o_unit_h,                       # strides, in units of 8 elements
    do_unit_b, do_unit_t, do_unit_h,
    B, H, T, padded_T,
    D: gl.constexpr, DIM: gl.constexpr,
    DO: gl.constexpr, DLSE: gl.constexpr, SINKS: gl.constexpr, CHECK_NAN: gl.constexpr, PACKED: gl.constexpr,
    SUM: gl.constexpr,                                  # columns of the sum of dq, 0 if there is none
):
    # fmt: on
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(1, tile)
    h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    first = gl.program_id(0) * ROWS
    place = first + gl.arange(0, ROWS, line)
    t = place
    there = t < T
    if PACKED:
        i_b, _ = packed_tile(first // PADDED, cu_ptr, B, PADDED)
        row_0 = gl.load(cu_ptr + i_b).to(gl.int32)
        t = row_0 + place - (row_0 // PADDED + i_b) * PADDED
        there = t < gl.load(cu_ptr + i_b + 1).to(gl.int32)
    delta = gl.zeros([ROWS], gl.float32, line)
    if DO:
        c = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, tile)), 0)
        o_rows = (b * o_unit_b + h.to(gl.int64) * o_unit_h + t.to(gl.int64) * o_unit_t) * 8
        do_rows = (b * do_unit_b + h.to(gl.int64) * do_unit_h + t.to(gl.int64) * do_unit_t) * 8
        mask = gl.expand_dims(there, 1) & (c < DIM)
        o = gl.load(o_ptr + gl.expand_dims(o_rows, 1) + c, mask=mask, other=0.0).to(gl.float32)
        do = gl.load(do_ptr + gl.expand_dims(do_rows, 1) + c, mask=mask, other=0.0).to(gl.float32)
        delta += gl.sum(o * do, 1)
    row = (b * H + h) * T + t
    if DLSE:
        delta -= gl.load(dlse_ptr + row, mask=there, other=0.0)
    lse = gl.load(lse_ptr + row, mask=there, other=float("inf")) * LOG2E
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    word = (b * H + h) * padded_T + place
    gl.store(words_ptr + word, lse)
    gl.store(delta_ptr + word, delta)
    if SINKS:
        gl.store(rows_ptr + row, delta, mask=there)
    if CHECK_NAN:
        if PACKED:
            gl.store(stats_ptr + row, _word(lse, delta), mask=there)
        else:
            gl.store(stats_ptr + word, _word(lse, delta))
        gl.store(nan_flag_ptr, 0, mask=(first == 0) & (h == 0) & (gl.program_id(2) == 0))
    if SUM:
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        start = ((b * H + h) * padded_T + first) * SUM
        for i in gl.static_range(ROWS * SUM // 512):
            gl.store(sum_ptr + start + i * 512 + gl.arange(0, 512, flat), gl.zeros([512], gl.float32, flat))


_start_row_words = Kernel(row_words_of)


def row_words(
    o: Tensor, do: Tensor | None, lse: Tensor, dlse: Tensor | None, cu_q: Tensor | None, *,
    care: bool, sinks: bool, columns: int,
) -> Words:  # fmt: skip
    """The words of all rows; with `care` what a repair needs too, with `sinks` what their gradient needs, with `columns` zeros of
    so many for each row."""
    H, T = lse.shape[-2:]
    if cu_q is None:
        B, padded_T = lse.shape[0], -(-T // PADDED.value) * PADDED.value
    else:
        B, padded_T = cu_q.shape[0] - 1, (T // PADDED.value + cu_q.shape[0] - 1) * PADDED.value

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=lse.device)

    outer = lse.shape[:-1]
    words, delta = new(*outer, padded_T), new(*outer, padded_T)
    rows = new(*lse.shape) if sinks else None
    stats = new(*outer, padded_T if cu_q is None else T, dtype=torch.int64) if care else None
    lost = new(1, dtype=torch.int32) if care else None
    sum_of_dq = dq_accumulator.empty(words.numel(), columns, lse.device) if columns else None
    grid = (padded_T // ROWS.value, H, B if cu_q is None else 1)
    tensors = (o, *(lse if x is None else x for x in (do, lse, dlse, words, delta, rows, stats, lost, sum_of_dq, cu_q)))
    numbers = (*_units(o), *_units(o if do is None else do), B, H, T, padded_T)
    constants = _constants(o.shape[-1], do is not None, dlse is not None, sinks, care, cu_q is not None, columns)
    _start_row_words(grid, (*tensors, *numbers), constants)
    return Words(words, delta, rows, stats, lost, sum_of_dq)


@cache
def _constants(dim: int, do: bool, dlse: bool, sinks: bool, care: bool, packed: bool, columns: int) -> dict[str, int]:
    flags = {"D": padded(dim), "DIM": dim, "DO": do, "DLSE": dlse, "SINKS": sinks, "CHECK_NAN": care, "PACKED": packed}
    return flags | {"SUM": columns, "num_warps": 4}


def _units(x: Tensor) -> tuple[int, ...]:
    """(batch, position, head) strides of what the copy engine can read, in units of 8 elements."""
    b, t, h = x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])
    return b // 8, t // 8, h // 8
