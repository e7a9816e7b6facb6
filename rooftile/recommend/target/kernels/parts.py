"""Softmax over whole histories of few users: packed attention to parts of a history at once, whose results are merged by lse.

Packed attention has one program per tile of candidates and head, whatever the history's length. A part of a history is a packed
sequence here, with a copy of its user's candidates, so that programs are as many as processors. The host reads no offset: it
starts a kernel that copies, packed attention, and a kernel that merges.

    lse = log sum_p exp(lse_p)          o = sum_p exp(lse_p - lse) o_p
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact import api
from rooftile.exact.masks import FULL
from rooftile.exact.spec import CallSettings, Options
from rooftile.recommend.target.kernels.outputs import processors
from rooftile.recommend.target.problem import Batch
from rooftile.runtime.launch import Kernel, device_of

# candidates of a tile of packed attention, by which its programs are estimated
ROWS = 128
# the least events of a part, a multiple of which a part has: the largest block of keys of packed attention divides it
LEAST_EVENTS = 512
BLOCK = 128
# the least events of a history, on average, from which parts are faster on an H200: in a captured graph, and where the host launches
# them. The host takes three times as long for parts as for one call, and is waited for below the second number
LEAST_CAPTURED, LEAST_EAGER = 4096, 32768
# parts that a step of the merge reads
STEP = 8


@triton.jit
def _user_of(row, cu_q_ptr, B):
    """The user of a candidate: the last one that begins at the row or before."""
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q_ptr + middle) <= row:
            low = middle
        else:
            high = middle
    return low


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "total", "parts", "least"])
def _copy_candidates(
    q_ptr, cu_q_ptr, cu_ptr, rows_ptr, cu_rows_ptr, cu_parts_ptr, q_row, q_head, B, H, total, parts, least,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Programs below `total` copy a candidate to all parts of its user; the others write the offsets of a user's parts."""
    pid = tl.program_id(0)
    if pid < total:
        b = _user_of(pid, cu_q_ptr, B)
        first = tl.load(cu_q_ptr + b).to(tl.int64)
        n = tl.load(cu_q_ptr + b + 1).to(tl.int64) - first
        h = tl.arange(0, BLOCK_H)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        there = (h < H) & (d < D)
        q = tl.load(q_ptr + pid.to(tl.int64) * q_row + h.to(tl.int64) * q_head + d, mask=there)
        row = first * parts + pid - first
        for p in range(parts):
            tl.store(rows_ptr + ((row + p * n) * H + h) * D + d, q, mask=there)
    else:
        b = pid - total
        first = tl.load(cu_q_ptr + b).to(tl.int64)
        n = tl.load(cu_q_ptr + b + 1).to(tl.int64) - first
        event = tl.load(cu_ptr + b).to(tl.int64)
        events = tl.load(cu_ptr + b + 1).to(tl.int64) - event
        # whole blocks, so that only a user's last part with events ends inside one
        each = tl.cdiv(tl.cdiv(events, parts), least) * least
        # the end of the last part is the next user's beginning
        for p in range(parts + 1):
            tl.store(cu_rows_ptr + b * parts + p, (first * parts + p * n).to(tl.int32))
            tl.store(cu_parts_ptr + b * parts + p, (event + tl.minimum(p * each, events)).to(tl.int32))


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "total", "parts"])
def _merge(
    o_ptr, lse_ptr, cu_q_ptr, out_ptr, B, H, total, parts,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, STEP: tl.constexpr,
):
    # fmt: on
    """Merges the parts of a candidate and a head: o (parts total, H, DV) and lse (H, parts total) to out (total, H, DV)."""
    row = tl.program_id(0)
    h = tl.program_id(1)
    b = _user_of(row, cu_q_ptr, B)
    first = tl.load(cu_q_ptr + b).to(tl.int64)
    n = tl.load(cu_q_ptr + b + 1).to(tl.int64) - first
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    m = tl.full((), float("-inf"), tl.float32)
    l = tl.zeros((), tl.float32)
    for start in range(0, parts, STEP):
        p = start + tl.arange(0, STEP)
        there = p < parts
        rows = first * parts + p * n + row - first
        lse = tl.load(lse_ptr + h * (parts * total.to(tl.int64)) + rows, mask=there, other=float("-inf"))
        o = tl.load(o_ptr + (rows[:, None] * H + h) * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        # parts without events: -inf - -inf is nan
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp(m - pivot)
        w = tl.exp(lse - pivot)
        acc = acc * alpha + tl.sum(w[:, None] * o, 0)
        l = l * alpha + tl.sum(w, 0)
        m = m_new
    acc = acc / tl.where(l == 0.0, 1.0, l)
    tl.store(out_ptr + (row.to(tl.int64) * H + h) * DV + dv, acc.to(out_ptr.dtype.element_ty), mask=dv < DV)


_start_copy, _start_merge = Kernel(_copy_candidates), Kernel(_merge)


def parts_of(batch: Batch) -> int:
    """The parts into which histories are cut: as many as fill the processors about once, 1 to cut nothing."""
    q, users = batch.q, batch.cu.shape[0] - 1
    events = batch.keys.shape[0] // max(users, 1)
    captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if not q.numel() or events < (LEAST_CAPTURED if captured else LEAST_EAGER):
        return 1
    programs = max(-(-q.shape[0] // ROWS), users) * q.shape[1]
    return max(min(processors(q.device) // programs, events // LEAST_EVENTS), 1)


def attend(batch: Batch, scale: float, parts: int) -> Tensor:
    """Returns o (total_q, H, Dv) without a gradient, by softmax over histories in this number of parts."""
    q, keys, values, _, _, cu_q, cu = batch
    q = q if q.stride(-1) == 1 else q.contiguous()
    (total, H, D), Dv, B = q.shape, values.shape[2], cu.shape[0] - 1
    rows = q.new_empty(parts * total, H, D)
    offsets, cuts = (torch.empty(B * parts + 1, dtype=torch.int32, device=q.device) for _ in range(2))
    out = q.new_empty(total, H, Dv)
    with device_of(q), torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        own: dict[str, Any] = {"D": D, "BLOCK_H": triton.next_power_of_2(H), "BLOCK_D": triton.next_power_of_2(D), "num_warps": 4}
        copied = (q, cu_q, cu, rows, offsets, cuts, q.stride(0), q.stride(1), B, H, total, parts, BLOCK)
        _start_copy((total + B, 1, 1), copied, own)
        settings = CallSettings(scale, deterministic=False, needs_lse=True, partial=True)
        o, lse = api.attend(rows, keys, values, FULL, Options(cu_q=offsets, cu_k=cuts), settings, is_packed=True)
        own = {"DV": Dv, "BLOCK_DV": triton.next_power_of_2(Dv), "STEP": STEP, "num_warps": 1 if Dv <= 128 else 2}
        _start_merge((total, H, 1), (o, lse, cu_q, out, B, H, total, parts), own)
    return out
