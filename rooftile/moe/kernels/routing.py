"""The router without gradients, in two launches: logits, then the choice and its gates.

`rooftile.moe.routing` defines it. A program of the product owns an expert and a few tokens, so that few tokens keep many
processors busy; for many tokens PyTorch's product in fp32 is faster. A program of the choice owns a token. One launch for both
would need a counter, which somebody has to set back to zero, or one processor that reads all centroids alone.

Numbers are chosen by keys, integers that order like them: NaN is above all numbers, as in a sort, and 0 equals -0.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rooftile.moe.router import Router
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

# tokens of a program of the product, and the numbers of each that it reads at once
TOKENS, NUMBERS = 4, 1024
# the most tokens whose logits are computed here
FEW = 32
# the experts that a program of the choice holds
LARGEST_E = 1024
# the numbers of a token: the loop over them is unrolled
LARGEST_D = 16384
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# below the key of -inf: for places without an expert, and for experts that are chosen already
TAKEN = tl.constexpr(-2147483648)
LOWEST = tl.constexpr(-2139095041)
NAN = tl.constexpr(2147483647)


# fmt: off
@triton.jit(do_not_specialize=["N"])
def _logits(
    u_ptr, centroids_ptr, bias_ptr, z_ptr, N, E: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """z = u E^T + bias in fp32, (N, E); products and sums are in fp32, whatever the dtypes."""
    if PDL:
        wait_for_inputs()
    e = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in tl.static_range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        c = tl.load(centroids_ptr + e.to(tl.int64) * D + d, mask=d < D, other=0.0)
        u = tl.load(u_ptr + t[:, None] * D + d[None, :], mask=(t < N)[:, None] & (d < D)[None, :], other=0.0)
        sums += u.to(tl.float32) * c.to(tl.float32)[None, :]
    z = tl.sum(sums, 1)
    if BIAS:
        z += tl.load(bias_ptr + e).to(tl.float32)
    tl.store(z_ptr + t * E + e, z, mask=t < N)


@triton.jit
def _key(x):
    """Returns an integer for each number, such that integers order like numbers, NaN above them."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN)


@triton.jit
def _number(key):
    """Returns the number that has this key."""
    found = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == NAN, float("nan"), found)


@triton.jit
def _best(key, place, axis: tl.constexpr):
    """Returns the largest key along an axis, and the lowest place that has it; places are below 2^31."""
    both = (key.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    best = tl.max(both, axis)
    return (best >> 32).to(tl.int32), 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


# fmt: off
@triton.jit
def _choose(
    z_ptr, u_ptr, bias_ptr, scores_ptr, experts_ptr, gates_ptr, scale,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, ACTIVE_GROUPS: tl.constexpr, SCORE: tl.constexpr,
    BEST_TWO: tl.constexpr, NORMALISE: tl.constexpr, LEAST: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """The scores, experts and gates of one token. A tile holds its experts, (groups, experts of a group)."""
    if PDL:
        wait_for_inputs()
    t = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = E // GROUPS
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    is_expert = (g < GROUPS)[:, None] & (s < SIZE)[None, :]
    e = tl.where(is_expert, g[:, None] * SIZE + s[None, :], E)
    z = tl.load(z_ptr + t * E + e, mask=is_expert, other=float("-inf"))
    if SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-z))
    else:
        # NaN, which the maximum passes over, comes back with the sum
        powers = tl.where(is_expert, tl.exp(z - tl.max(tl.max(z, 1), 0)), 0.0)
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    tl.store(scores_ptr + t * E + e, scores, mask=is_expert)
    values = z if SCORE == "chosen softmax" else scores
    ranked = values
    if BIAS:
        ranked += tl.load(bias_ptr + e, mask=is_expert, other=0.0).to(tl.float32)
    key = tl.where(is_expert, _key(ranked), TAKEN)
    if GROUPS > 1:
        of, place = _best(key, e, 1)
        if BEST_TWO:
            second, _ = _best(tl.where(e == place[:, None], TAKEN, key), e, 1)
            of = _key(_number(of) + _number(second))
        of = tl.where(g < GROUPS, of, TAKEN)
        is_kept = g < 0
        for _ in tl.static_range(ACTIVE_GROUPS):
            _, group = _best(of, g, 0)
            is_kept = is_kept | (g == group)
            of = tl.where(g == group, TAKEN, of)
        key = tl.where(is_expert & ~is_kept[:, None], LOWEST, key)
    n = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    gates = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(K):
        by_group, places = _best(key, e, 1)
        _, which = _best(by_group, g, 0)
        place = tl.sum(tl.where(g == which, places, 0), 0)
        gate = tl.sum(tl.sum(tl.where(e == place, values, 0.0), 1), 0)
        chosen = tl.where(n == k, place, chosen)
        gates = tl.where(n == k, gate, gates)
        key = tl.where(e == place, TAKEN, key)
    if SCORE == "chosen softmax":
        powers = tl.exp(gates - tl.max(tl.where(n < K, gates, float("-inf")), 0))
        powers = tl.where(n < K, powers, 0.0)
        gates = powers / tl.sum(powers, 0)
    if NORMALISE:
        gates = gates / (tl.sum(tl.where(n < K, gates, 0.0), 0) + LEAST)
    gates *= scale
    if ROUND:
        gates = gates.to(u_ptr.dtype.element_ty).to(tl.float32)
    tl.store(experts_ptr + t * K + n, chosen, mask=n < K)
    tl.store(gates_ptr + t * K + n, gates, mask=n < K)


_start_logits, _start_choice = Kernel(_logits), Kernel(_choose)


@cache
def logits_constants(E: int, d: int, bias: bool, device: torch.device) -> dict[str, Any]:
    block = min(triton.next_power_of_2(d), NUMBERS)
    own = {"E": E, "D": d, "BIAS": bias, "BLOCK_N": TOKENS, "BLOCK_D": block}
    return own | overlaps(device) | {"num_warps": 4}


@cache
def choice_constants(E: int, router: Router, least: float, bias: bool, device: torch.device) -> dict[str, Any]:
    groups, size = router.groups, E // router.groups
    blocks = {"BLOCK_G": triton.next_power_of_2(groups), "BLOCK_S": triton.next_power_of_2(size)}
    return {
        "E": E, "K": router.active, "GROUPS": groups, "ACTIVE_GROUPS": router.active_groups, "SCORE": router.score,
        "BEST_TWO": router.group_score == "sum of best two", "NORMALISE": router.normalise, "LEAST": least, "BIAS": bias,
        "ROUND": router.round_gates, **blocks, "BLOCK_K": triton.next_power_of_2(router.active), **overlaps(device),
        "num_warps": 1,
    }  # fmt: skip


def refusal(u: Tensor, centroids: Tensor) -> str | None:
    """Says why the kernels do not route such tokens, or None."""
    if u.dtype not in _DTYPES or centroids.dtype not in _DTYPES:
        return f"u is {u.dtype} and centroids {centroids.dtype}; have bfloat16, float16 and float32"
    if not u.shape[-1] or u.shape[-1] > LARGEST_D or centroids.shape[0] > LARGEST_E:
        return f"centroids is {tuple(centroids.shape)}; has up to {LARGEST_E} experts and 1 to {LARGEST_D} numbers"
    return None


def route(
    u: Tensor, centroids: Tensor, bias: Tensor | None, logit_bias: Tensor | None, router: Router, least: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the experts (N, K) in int32, their gates and all scores (N, E) of tokens (N, d), both in fp32.

    `least` is added to a sum of gates.
    """
    (N, _), E, K = u.shape, centroids.shape[0], router.active
    experts = torch.empty((N, K), dtype=torch.int32, device=u.device)
    gates, scores = (torch.empty((N, n), dtype=torch.float32, device=u.device) for n in (K, E))
    if N:
        z = logits(u, centroids, logit_bias, deterministic)
        arguments = z, u, z if bias is None else bias.contiguous(), scores, experts, gates, float(router.scale)
        _start_choice((N, 1, 1), arguments, choice_constants(E, router, least, bias is not None, u.device))
    return experts, gates, scores


def logits(u: Tensor, centroids: Tensor, bias: Tensor | None, deterministic: bool) -> Tensor:
    """The logits (N, E) in fp32 of tokens (N, d)."""
    (N, d), E = u.shape, centroids.shape[0]
    if N > FEW and not deterministic:
        return functional.linear(u.float(), centroids.float(), None if bias is None else bias.float())
    u, centroids = u.contiguous(), centroids.contiguous()
    if u.data_ptr() % 16:
        # loads of another width would add in another order
        u = u.clone()
    z = torch.empty((N, E), dtype=torch.float32, device=u.device)
    arguments = u, centroids, u if bias is None else bias.contiguous(), z, N
    _start_logits((triton.cdiv(N, TOKENS), E, 1), arguments, logits_constants(E, d, bias is not None, u.device))
    return z
