"""The experts of very few tokens without gradients, in two launches: every choice of a token is a group of its own.

    a_tk = act(up_k u_t)                                       and a_t = act(shared_up u_t)
    y_t  = sum over k of g_tk down_k a_tk, + shared_down a_t

Each weight that a token touches is read once, and nearly nothing else, so a program is a few rows of a weight, with as many
loads in flight as registers hold: no tile of a matrix unit is filled, and nothing is sorted. A program of the second launch owns
columns of a token's output, and goes through its choices in their order. The gate multiplies in fp32, inside the sum.

Tokens that choose the same expert read it twice, the second time from L2 at best: for more tokens rows are sorted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rooftile.fused.kernels.one_row import numbers_of
from rooftile.moe.activations import halves
from rooftile.moe.kernels.activations import _activated
from rooftile.moe.kernels.products import _ELSEWHERE
from rooftile.moe.problem import FEW, Options, QuantisedWeights, Weights
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.early_weights import may_read_early
from rooftile.runtime.launch import Kernel

# the most numbers of a row that a program reads at once, and the rows of the first launch's programs
FIRST_NUMBERS, SECOND_NUMBERS, ROWS = 2048, 512, 2
# the most steps of a program, which are unrolled
STEPS = 64


# fmt: off
@triton.jit
def _add_products(sums, x_ptr, w_ptr, factor, is_row, IN: tl.constexpr, BLOCK_K: tl.constexpr):
    # fmt: on
    """Adds factor x w to sums (rows, BLOCK_K): their sum over the second axis is the product. w_ptr points to the rows."""
    for first in tl.static_range(0, IN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < IN, other=0.0).to(tl.float32) * factor
        w = tl.load(w_ptr[:, None] + k[None, :], mask=is_row[:, None] & (k < IN)[None, :], other=0.0)
        sums += w.to(tl.float32) * x[None, :]
    return sums


# fmt: off
@triton.jit
def _inner(
    u_ptr, w_ptr, bias_ptr, a_ptr, n, D: tl.constexpr, H: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WAITS: tl.constexpr,
):
    # fmt: on
    """Writes numbers n of act(W u + bias); W is (2 H, D), gate rows first, or (H, D). WAITS: for u, when W is on its way."""
    TWO: tl.constexpr = ACTIVATION != "relu2"
    k = tl.arange(0, BLOCK_K)
    mask = (n < H)[:, None] & (k < D)[None, :]
    row = w_ptr + n.to(tl.int64)[:, None] * D
    gate = tl.load(row + k[None, :], mask=mask, other=0.0)
    up = tl.load(row + (H * D + k)[None, :], mask=mask, other=0.0) if TWO else gate
    if WAITS:
        gdc_wait()
    u = tl.load(u_ptr + k, mask=k < D, other=0.0).to(tl.float32)[None, :]
    gates, ups = gate.to(tl.float32) * u, up.to(tl.float32) * u
    for first in tl.static_range(BLOCK_K, D, BLOCK_K):
        u = tl.load(u_ptr + first + k, mask=first + k < D, other=0.0).to(tl.float32)[None, :]
        mask = (n < H)[:, None] & (first + k < D)[None, :]
        gates += tl.load(row + (first + k)[None, :], mask=mask, other=0.0).to(tl.float32) * u
        if TWO:
            ups += tl.load(row + (H * D + first + k)[None, :], mask=mask, other=0.0).to(tl.float32) * u
    p = tl.sum(gates, 1)
    q = tl.sum(ups, 1) if TWO else p
    if BIAS:
        p += tl.load(bias_ptr + n, mask=n < H, other=0.0).to(tl.float32)
        if TWO:
            q += tl.load(bias_ptr + H + n, mask=n < H, other=0.0).to(tl.float32)
    tl.store(a_ptr + n, _activated(p, q, ACTIVATION).to(a_ptr.dtype.element_ty), mask=n < H)


# fmt: off
@triton.jit(do_not_specialize=["early"])
def _first(
    u_ptr, chosen_ptr, up_ptr, bias_ptr, shared_ptr, a_ptr, early, E: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    H: tl.constexpr, S: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # fmt: on
    """a of a token: (K, H) of its choices, then (S,) of the shared network. Choices that are no experts are left out.

    The shared network's programs come first. They know their weights before the router has chosen, and with `early` read them.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION == "relu2" else 2
    BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    SHARED: tl.constexpr = (S + BLOCK_N - 1) // BLOCK_N
    # tokens are neighbours: so what they all read is in L2
    t = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    a = a_ptr + t * (K * H + S)
    u = u_ptr + t * D
    if PDL:
        gdc_launch_dependents()
        if (early == 0) | (place >= SHARED):
            gdc_wait()
    if place >= SHARED:
        choice = (place - SHARED) // BLOCKS
        n = (place - SHARED) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        expert = tl.load(chosen_ptr + t * K + choice)
        if (expert >= 0) & (expert < E):
            w = up_ptr + expert.to(tl.int64) * (HALVES * H * D)
            _inner(u, w, bias_ptr + expert * (HALVES * H), a + choice * H, n, D, H, ACTIVATION, BIAS, BLOCK_N, BLOCK_K, False)
    elif S > 0:
        n = place * BLOCK_N + tl.arange(0, BLOCK_N)
        _inner(u, shared_ptr, bias_ptr, a + K * H, n, D, S, ACTIVATION, False, BLOCK_N, BLOCK_K, PDL)


# fmt: off
@triton.jit
def _second(
    a_ptr, chosen_ptr, gates_ptr, down_ptr, bias_ptr, shared_ptr, u_ptr, shared_gate_ptr, y_ptr,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, H: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """y of a few columns of a token. A choice that is no expert gives NaN, and one that is ELSEWHERE adds nothing."""
    if PDL:
        wait_for_inputs()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    a = a_ptr + t * (K * H + S)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    y = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(K):
        expert = tl.load(chosen_ptr + t * K + choice)
        gate = tl.load(gates_ptr + t * K + choice)
        is_expert = (expert >= 0) & (expert < E)
        # NaN is added apart from the sum: no program wrote the row of such a choice
        y += tl.where(is_expert | (expert == _ELSEWHERE), 0.0, float("nan"))
        if is_expert:
            w = down_ptr + expert.to(tl.int64) * (D * H) + n.to(tl.int64) * H
            sums = _add_products(sums, a + choice * H, w, gate, n < D, H, BLOCK_K)
            if BIAS:
                y += gate * tl.load(bias_ptr + expert.to(tl.int64) * D + n, mask=n < D, other=0.0).to(tl.float32)
    if S > 0:
        factor = 1.0
        if GATED:
            logits = tl.zeros((BLOCK_D,), tl.float32)
            for first in tl.static_range(0, D, BLOCK_D):
                d = first + tl.arange(0, BLOCK_D)
                u = tl.load(u_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
                logits += u * tl.load(shared_gate_ptr + d, mask=d < D, other=0.0).to(tl.float32)
            factor = tl.sigmoid(tl.sum(logits, 0))
        sums = _add_products(sums, a + K * H, shared_ptr + n.to(tl.int64) * S, factor, n < D, S, BLOCK_K)
    y += tl.sum(sums, 1)
    tl.store(y_ptr + t * D + n, y.to(y_ptr.dtype.element_ty), mask=n < D)


_start_first, _start_second = Kernel(_first), Kernel(_second)


@cache
def first_constants(
    E: int, K: int, d: int, h: int, s: int, activation: str, bias: bool, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:  # fmt: skip
    sizes = {"E": E, "K": K, "D": d, "H": h, "S": s, "ACTIVATION": activation, "BIAS": bias}
    block = numbers_of(d, FIRST_NUMBERS)
    # a thread has 32 bytes of each row
    warps = max(block * dtype.itemsize // 1024, 1)
    return sizes | {"BLOCK_N": ROWS, "BLOCK_K": block, "num_warps": warps} | overlaps(device)


@cache
def second_constants(E: int, K: int, d: int, h: int, s: int, bias: bool, gated: bool, device: torch.device) -> dict[str, Any]:
    sizes = {"E": E, "K": K, "D": d, "H": h, "S": s, "BIAS": bias, "GATED": gated}
    block = numbers_of(h, SECOND_NUMBERS)
    own = {"BLOCK_N": max(SECOND_NUMBERS // max(block, 256), 1), "BLOCK_K": block, "BLOCK_D": numbers_of(d, FIRST_NUMBERS)}
    # a step reads 512 numbers, of one row or two; a thread has 8 neighbours of each, so threads exchange no a
    return sizes | own | {"num_warps": max(block // 256, 1)} | overlaps(device)


def takes(
    u: Tensor, chosen: Tensor, weights: Weights | QuantisedWeights, options: Options, keep: bool
) -> bool:  # fmt: skip
    """Whether these kernels run a call: a few tokens, whose bits may differ from those among many, and no backward."""
    if isinstance(weights, QuantisedWeights):
        return False
    K, h = chosen.shape[1], weights.down.shape[2]
    s = 0 if weights.shared_down is None else weights.shared_down.shape[1]
    block = numbers_of(h, SECOND_NUMBERS)
    steps = K * triton.cdiv(h, block) + triton.cdiv(s, block)
    return 0 < u.shape[0] <= FEW and not keep and not options.deterministic and steps <= STEPS


def forward(u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights, options: Options) -> Tensor:
    """y (N, d) of tokens (N, d), which `takes` takes."""
    u, chosen, gates = u.contiguous(), chosen.contiguous(), gates.contiguous()
    up, down, up_bias, down_bias, shared_up, shared_down, shared_gate = (None if x is None else x.contiguous() for x in weights)
    assert up is not None
    assert down is not None
    (N, d), K, (E, _, h) = u.shape, chosen.shape[1], down.shape
    s = 0 if shared_down is None else shared_down.shape[1]
    a, y = u.new_empty((N, K * h + s)), torch.empty_like(u)
    assert up.shape[1] == halves(options.activation) * h
    constants = first_constants(E, K, d, h, s, options.activation, up_bias is not None, u.dtype, u.device)
    blocks = K * triton.cdiv(h, constants["BLOCK_N"]) + triton.cdiv(s, constants["BLOCK_N"])
    # any tensor stands for one that is not there
    arguments: tuple[Any, ...] = (
        u, chosen, up, up if up_bias is None else up_bias, up if shared_up is None else shared_up, a,
        int(may_read_early()),
    )  # fmt: skip
    _start_first((N, blocks, 1), arguments, constants)
    constants = second_constants(E, K, d, h, s, down_bias is not None, shared_gate is not None, u.device)
    arguments = (
        a, chosen, gates, down, down if down_bias is None else down_bias, down if shared_down is None else shared_down, u,
        u if shared_gate is None else shared_gate, y,
    )  # fmt: skip
    _start_second((N, triton.cdiv(d, constants["BLOCK_N"]), 1), arguments, constants)
    return y
