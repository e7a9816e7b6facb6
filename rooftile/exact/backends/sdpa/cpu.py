"""PyTorch's flash attention on the CPU, adapted to Rooftile's contract.

Its causal mask is aligned top-left, and it crashes (a division by zero) without queries or keys. So rows without keys are
cut off first, and causal attention of T queries to S > T keys takes two calls: full attention to the first S - T keys and
square causal attention to the rest, merged by their lse. The backward of each part uses the merged o and lse, and is
exact.

It multiplies whole tiles, so NaN behind the mask leaks into the result. If a result holds NaN, the inputs are checked: if
they are not finite, the call runs again with zeros in place of them, and NaN is written to the rows that see one. If the
result is finite, nothing leaked; that check costs one sum.

Its backward computes weights as exp(x - lse). Where the scores of a row share a large offset, such a row's weights add up to any
number, so a call with one of them goes to another backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from rooftile.exact.backends.sdpa import stock
from rooftile.exact.masks import CAUSAL
from rooftile.exact.reference import merge
from rooftile.exact.reference.nonfinite import all_finite, seeing_keys, seen_by_rows, set_aside
from rooftile.exact.spec import Grads, Spec

# an lse within this is rounded by no more than the scores that it came from
FAR = 64.0


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    keyless = _keyless(q, k, spec)
    q = q[:, keyless:]
    if not q.numel() or not k.numel():
        o = q.new_zeros(q.shape)
        lse = q.new_full(o.shape[:-1], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32)).mT
    else:
        o, lse = _attend(q, k, v, spec)
        if not spec.mask.is_full and not all_finite(o):
            o, lse = _attend_beside_nan(q, k, v, spec)
    if keyless:
        o, lse = pad(o, (0, 0, 0, 0, keyless, 0)), pad(lse, (keyless, 0), value=-math.inf)
    return o.contiguous(), lse.contiguous()


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: Spec) -> Grads:
    keyless = _keyless(q, k, spec)
    do, q, o, lse = do[:, keyless:], q[:, keyless:], o[:, keyless:], lse[..., keyless:]
    if not q.numel() or not k.numel():
        grads = tuple(x.new_zeros(x.shape) for x in (q, k, v))
    else:
        grads = _gradients(do, q, k, v, o, lse, spec)
        if not spec.mask.is_full and not all_finite(*grads):
            grads = _gradients_beside_nan(do, q, k, v, o, lse, spec)
    dq, dk, dv = grads
    if keyless:
        dq = pad(dq, (0, 0, 0, 0, keyless, 0))
    return Grads(dq.contiguous(), dk.contiguous(), dv.contiguous())


def has_far_rows(lse: Tensor) -> bool:
    """Whether the weights of some row, computed from its lse, would not add up to one."""
    return bool((lse.abs().gt(FAR) & lse.isfinite()).any())


def _keyless(q: Tensor, k: Tensor, spec: Spec) -> int:
    """Counts the first rows, which see no key."""
    return 0 if spec.mask.is_full else max(q.shape[1] - k.shape[1], 0)


def _parts(T: int, S: int, spec: Spec) -> tuple[tuple[slice, bool], ...]:
    """Returns the keys of each call, and whether it is causal."""
    # one query, the last, sees all keys
    if spec.mask.is_full or T == 1:
        return ((slice(0, S), False),)
    square = (slice(S - T, S), True)
    return (square,) if S == T else ((slice(0, S - T), False), square)


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, D) and lse (B, H, T), any strides."""
    run = stock.kernel(stock.CPU_FORWARD, "CPU")
    parts = []
    for keys, causal in _parts(q.shape[1], k.shape[1], spec):
        found = [
            run(stock.by_heads(q[:, :, heads]), *shared, 0.0, causal, scale=spec.scale)
            for heads, *shared in _groups(k[:, keys], v[:, keys], spec.group)
        ]
        os, lses = zip(*found, strict=True)
        parts.append((_joined(os, 1).transpose(1, 2), _joined(lses, 1)))
    return parts[0] if len(parts) == 1 else merge(parts)


def _gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq (B, T, H, D), dk and dv (B, S, Hk, D), any strides."""
    run = stock.kernel(stock.CPU_BACKWARD, "CPU")
    dqs, dks, dvs = [], [], []
    for keys, causal in _parts(q.shape[1], k.shape[1], spec):
        found = []
        for heads, *shared in _groups(k[:, keys], v[:, keys], spec.group):
            given_do, given_q, given_o = (stock.by_heads(x[:, :, heads]) for x in (do, q, o))
            dq, dk, dv = run(given_do, given_q, *shared, given_o, lse[:, heads], 0.0, causal, scale=spec.scale)
            if spec.group > 1:
                dk, dv = (x.sum(1, keepdim=True) for x in (dk, dv))
            found.append((dq, dk, dv))
        for grads, grad in zip((dqs, dks, dvs), zip(*found, strict=True), strict=True):
            grads.append(_joined(grad, 1).transpose(1, 2))
    return (dqs[0] if len(dqs) == 1 else dqs[0] + dqs[1]), _joined(dks, 1), _joined(dvs, 1)


def _groups(k: Tensor, v: Tensor, group: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields query heads with their keys and values (B, heads, S, D): the kernel needs equal numbers of heads.

    Each group is one call on one key head, repeated with a stride of zero, so that no key is copied.
    """
    if group == 1:
        yield slice(None), stock.by_heads(k), stock.by_heads(v)
        return
    for h in range(k.shape[2]):
        shared = (stock.by_heads(x[:, :, h : h + 1]).expand(-1, group, -1, -1) for x in (k, v))
        yield slice(h * group, (h + 1) * group), *shared


def _joined(parts: list[Tensor] | tuple[Tensor, ...], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _attend_beside_nan(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    (q, lost_q), (k, lost_k), (v, lost_v) = (set_aside(x) for x in (q, k, v))
    o, lse = _attend(q, k, v, spec)
    T = q.shape[1]
    keys, values = (seen_by_rows(x.transpose(1, 2), CAUSAL, T) for x in (lost_k.any(-1, keepdim=True), lost_v))
    rows = lost_q.any(-1, keepdim=True).transpose(1, 2) | keys.repeat_interleave(spec.group, 1)  # (B, H, T, 1)
    lost_o = (rows | values.repeat_interleave(spec.group, 1)).transpose(1, 2)  # (B, T, H, D)
    return o.masked_fill(lost_o, math.nan), lse.masked_fill(rows[..., 0], math.nan)


def _gradients_beside_nan(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    (do, lost_do), (q, _), (k, _), (v, _), (o, lost_o) = (set_aside(x) for x in (do, q, k, v, o))
    lost_p = ~torch.isfinite(lse)  # (B, H, T): NaN in q or k that the row sees
    # gradients from lost rows are overwritten below; until then their weights are exp(-huge) = 0
    grads = _gradients(do, q, k, v, o, lse.masked_fill(lost_p, 1e30), spec)
    lost_p, lost_do = lost_p[..., None], lost_do.transpose(1, 2)  # (B, H, T, 1 | D)
    lost_x = lost_p | (lost_do | lost_o.transpose(1, 2)).any(-1, keepdim=True)
    S, Hk = k.shape[1:3]
    dk, dv = (seeing_keys(lost, CAUSAL, S).unflatten(1, (Hk, -1)).any(2).transpose(1, 2) for lost in (lost_x, lost_p | lost_do))
    masks = (lost_x.transpose(1, 2), dk, dv)
    dq, dk, dv = (grad.masked_fill(lost, math.nan) for grad, lost in zip(grads, masks, strict=True))
    return dq, dk, dv
