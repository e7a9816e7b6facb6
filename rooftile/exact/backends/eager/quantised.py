"""Attention on quantised tensors in plain operations, as the kernels compute it: weights in FP8, in blocks of 128 keys, or of
64 if values have more than 128 channels.

    S = (s_q s_k) Q_8 K_8^T + shift        codes multiplied, then scaled, then the smoothing undone
    P = 2^2 exp(scale S - m), in e4m3      below 432, so that it rounds to at most 448, the format's largest
    O = exp(m - m') O + s_v P_8 V_8        summed block by block in fp32

m is the reference score of a row. It starts as the maximum of the first block that the row sees. It moves to the maximum of a
later block if weights there would be too large: if two of each eight keys have a sum of 432 or more (one GPU thread adds these).
So it seldom moves, and the sums are seldom rescaled.

The codes of queries, keys and values equal the kernels' bit for bit. The output differs by the rounding of sums, and of weights
close to a tie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.spec import Spec
from rooftile.numerics.formats import FP8_E4M3, decode, encode
from rooftile.numerics.recipe import QuantisedQKV, codes, scales_of_rows
from rooftile.numerics.scaling import BLOCK
from rooftile.numerics.softmax import LOG2E, RAISED, TOO_LARGE


def attend(qkv: QuantisedQKV, sinks: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """Returns o in the dtype of the original tensors, and lse in fp32."""
    by = qkv.precision.granularity
    q_rows = scales_of_rows(qkv.q, qkv.q_scales, by, qkv.cu_q)
    k_rows = scales_of_rows(qkv.k, qkv.k_scales, by, qkv.cu_k)
    v_rows = scales_of_rows(qkv.v, qkv.v_scales, by, qkv.cu_k)
    shift = qkv.shift if qkv.shift is not None else q_rows.new_zeros(()).expand(qkv.q.shape[:-1])
    queries = (codes(qkv.q), q_rows, shift.unsqueeze(-1))
    keys = (codes(qkv.k), k_rows, codes(qkv.v), v_rows)
    numbers = (sinks, spec, qkv.precision.pv == "fp8")
    if qkv.cu_q is None or qkv.cu_k is None:
        o, lse = _walk(*queries, *keys, *numbers)
        return o.to(qkv.dtype).contiguous(), lse.contiguous()
    o = qkv.v.new_zeros((*qkv.q.shape[:-1], qkv.v.shape[-1]), dtype=qkv.dtype)
    lse = q_rows.new_full((qkv.q.shape[1], qkv.q.shape[0]), -torch.inf)
    ends_q, ends_k = qkv.cu_q.tolist(), qkv.cu_k.tolist()
    for b in range(len(ends_q) - 1):
        t, s = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        part, part_lse = _walk(*(x[None, t] for x in queries), *(x[None, s] for x in keys), *numbers)
        o[t], lse[:, t] = part[0].to(qkv.dtype), part_lse[0]
    return o, lse


def _walk(
    q: Tensor, q_scales: Tensor, shift: Tensor, k: Tensor, k_scales: Tensor, v: Tensor, v_scales: Tensor,
    sinks: Tensor | None, spec: Spec, round_weights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes fp32 o (B, T, H, Dv) and lse (B, H, T) from codes and scales, block by block from the last keys to the first."""
    (B, T, H, _), (S, Hk), Dv = q.shape, k.shape[1:3], v.shape[-1]
    group = H // Hk

    def heads_first(x: Tensor) -> Tensor:
        """Views (B, rows, heads, n) as (B, Hk, group or 1, rows, n)."""
        return x.unflatten(2, (Hk, -1)).permute(0, 2, 3, 1, 4)

    q, q_scales, shift, k, k_scales, v, v_scales = (heads_first(x) for x in (q, q_scales, shift, k, k_scales, v, v_scales))
    i = torch.arange(T, device=q.device)[:, None] + (S - T)
    first, last = spec.mask.first_key(i), spec.mask.last_key(i)
    lost_values = v.isnan()
    clean_v = v.nan_to_num(nan=0.0)
    m = q.new_full((B, Hk, group, T, 1), -torch.inf)
    if sinks is not None:
        m = (sinks.float() * LOG2E).view(1, Hk, group, 1, 1).expand_as(m)
    l = torch.exp2(m - _finite(m) + RAISED)
    o = q.new_zeros(B, Hk, group, T, Dv)
    # a GPU has registers for this many at once
    step = BLOCK if Dv <= 128 else BLOCK // 2
    for start in range((S - 1) // step * step, -1, -step) if S else ():
        j = slice(start, min(start + step, S))
        keys = torch.arange(j.start, j.stop, device=q.device)
        sees = (keys >= first) & (keys <= last)
        x = (q @ k[:, :, :, j].mT * (q_scales * k_scales[:, :, :, j].mT) + shift) * spec.scale
        if spec.softcap:
            x = spec.softcap * torch.tanh(x / spec.softcap)
        x = torch.where(sees, x * LOG2E, -torch.inf)
        top = torch.where((m == -torch.inf) | _too_large(torch.exp2(x - _finite(m) + RAISED)), x.amax(-1, keepdim=True), m)
        alpha = torch.exp2(m - _finite(top))
        p = torch.exp2(x - _finite(top) + RAISED)
        l = l * alpha + p.sum(-1, keepdim=True)
        if round_weights:
            p = decode(encode(p, FP8_E4M3), FP8_E4M3)
        # one scale for the block, or one per channel
        part = p @ clean_v[:, :, :, j] * v_scales[:, :, :, start : start + 1]
        lost = sees.float() @ lost_values[:, :, :, j].float() > 0
        o = (o * alpha + part).masked_fill(lost, torch.nan)
        m = top
    lse = (m + torch.log2(l) - RAISED) / LOG2E
    o = torch.where(l == 0, 0.0, o / l)
    return o.permute(0, 3, 1, 2, 4).reshape(B, T, H, Dv), lse.squeeze(-1).reshape(B, H, T)


def _too_large(p: Tensor) -> Tensor:
    """Marks the rows whose weights in this block are too large (..., 1)."""
    eights = torch.nn.functional.pad(p, (0, -p.shape[-1] % 8)).unflatten(-1, (-1, 4, 2))
    return ~(eights.sum((-3, -1)) < TOO_LARGE).all(-1, keepdim=True)


def _finite(m: Tensor) -> Tensor:
    """Replaces -inf, of a row without a visible key so far, by 0: exp2(-inf - 0) is 0."""
    return m.masked_fill(m == -torch.inf, 0.0)
