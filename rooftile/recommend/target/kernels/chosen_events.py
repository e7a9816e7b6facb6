"""The gradients of chosen events: a program has one event and head, and walks the pairs in which a candidate has chosen it.

The pairs are sorted by event, so sums have one order and no atomic addition; an event that none has chosen gets zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.target.kernels.pairs import Numbers
from rooftile.recommend.target.kernels.shape import launch_of
from rooftile.recommend.target.problem import Batch, Problem, first_events
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit(do_not_specialize=["H"])
def _gradients_of_chosen(
    q_ptr, do_ptr, w_ptr, ds_ptr, pairs_ptr, starts_ptr, dk_ptr, dv_ptr, db_ptr, q_strides, do_strides, H, numbers,
    SPEC: tl.constexpr,
):
    # fmt: on
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    numbers = Numbers(*numbers)
    Hk = H // numbers.group
    kv = (tl.program_id(0) % Hk).to(tl.int64)
    j = (tl.program_id(0) // Hk).to(tl.int64)
    d = tl.arange(0, SPEC.BLOCK_D)
    d_v = tl.arange(0, SPEC.BLOCK_DV)
    s = tl.arange(0, SPEC.KEYS)
    heads = 1 if SPEC.SHARED else H
    dk = tl.zeros((BLOCK_D,), tl.float32)
    dv = tl.zeros((BLOCK_DV,), tl.float32)
    for c in range(0, numbers.group):
        h = kv * numbers.group + c
        group = j * heads + (0 if SPEC.SHARED else h)
        start = tl.load(starts_ptr + group)
        stop = tl.load(starts_ptr + group + 1)
        db = start * 0.0
        for n in range(start, stop, SPEC.KEYS):
            there = n + s < stop
            pair = tl.load(pairs_ptr + n + s, mask=there, other=0).to(tl.int64)
            i = pair // (heads * numbers.k)
            at = (i * H + h) * numbers.k + pair % numbers.k
            w = tl.load(w_ptr + at, mask=there, other=0.0)
            ds = tl.load(ds_ptr + at, mask=there, other=0.0)
            q = load_rows(q_ptr + i[:, None] * q_strides[0] + h * q_strides[1] + d[None, :], there, d, SPEC.D, True).to(tl.float32)
            do = load_rows(do_ptr + i[:, None] * do_strides[0] + h * do_strides[1] + d_v[None, :], there, d_v, SPEC.DV, True).to(tl.float32)
            dk += tl.sum(ds[:, None] * q, 0)
            dv += tl.sum(w[:, None] * do, 0)
            db += tl.sum(ds, 0)
        if SPEC.BIAS:
            tl.store(db_ptr + j * H + h, db)
    tl.store(dk_ptr + (j * Hk + kv) * SPEC.D + d, (dk * numbers.scale).to(dk_ptr.dtype.element_ty), mask=d < SPEC.D)
    tl.store(dv_ptr + (j * Hk + kv) * SPEC.DV + d_v, dv.to(dv_ptr.dtype.element_ty), mask=d_v < SPEC.DV)


_start = Kernel(_gradients_of_chosen)


def gradients_of_events(
    do: Tensor, w: Tensor, ds: Tensor, batch: Batch, problem: Problem
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns dk (total, Hk, D), dv (total, Hk, Dv), and the bias's gradient for each head (total, H) in fp32."""
    q, keys, values, bias = batch[:4]
    dk, dv = keys.new_empty(keys.shape), values.new_empty(values.shape)
    db = None if bias is None else q.new_empty((keys.shape[0], q.shape[1]), dtype=batch.wide)
    call = launch_of("chosen", batch, problem)
    if dk.numel():
        pairs, starts = _by_event(batch)
        arguments = (q, do, w, ds, pairs, starts, dk, dv, batch.cu if db is None else db)
        strides = (call.strides[0], (do.stride(0), do.stride(1)))
        _start((keys.shape[0] * keys.shape[1], 1, 1), (*arguments, *strides, call.H, call.numbers), call.constants)
    return dk, dv, db


def _by_event(batch: Batch) -> tuple[Tensor, Tensor]:
    """Pairs (total_q 1|H k) sorted by event and head, and where the pairs of each event and head begin, (total 1|H + 1)."""
    events, total = batch.events, batch.keys.shape[0]
    assert events is not None
    heads = events.shape[1]
    h = torch.arange(heads, device=events.device)[:, None]
    group = (first_events(batch)[:, None, None] + events) * heads + h
    # pairs that are not there come last
    group = torch.where(events >= 0, group, total * heads).flatten()
    found, pairs = group.sort(stable=True)
    starts = torch.searchsorted(found, torch.arange(total * heads + 1, device=events.device))
    return pairs, starts
