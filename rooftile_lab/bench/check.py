"""Checks that a call computes attention before it is timed.

A sample of the problem is computed from its definition twice: in fp64 (`exact`) and in the call's own dtype (`plain`).
A call passes where, for o and each gradient,

    max |x - exact| <= 2 max |plain - exact| + 8 ulp    and the same for the mean.

The sample is one sequence and the query heads of one key head, at the beginning and at the end of the batch. It has every
row where that is cheap and otherwise three blocks of rows; then the incoming gradient is zero outside those rows, so that
dk and dv depend on nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact import reference
from rooftile.exact.cases import Case, Inputs
from rooftile.exact.masks import FULL
from rooftile.exact.spec import DTYPES

# a sample of up to this many scores is computed whole; a GPU takes a few milliseconds
WHOLE = {"cpu": 1 << 23, "cuda": 1 << 30}
# the most scores that the definition holds at once
CHUNK = 1 << 26
BLOCK = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence and the query heads of one key head, restricted to some rows."""

    batch: int
    heads: slice
    key_heads: slice
    queries: slice  # on the packed axis; all of it for a dense batch
    keys: slice
    rows: tuple[slice, ...]  # within the sequence

    def queries_of(self, x: Tensor) -> Tensor:
        """This part of q, o, do or dq, as (1, T, heads, D)."""
        return x[None, self.queries, self.heads] if x.ndim == 3 else x[self.batch, None, :, self.heads]

    def keys_of(self, x: Tensor) -> Tensor:
        """This part of k, v, dk or dv, as (1, S, key heads, D)."""
        return x[None, self.keys, self.key_heads] if x.ndim == 3 else x[self.batch, None, :, self.key_heads]


class Conformance:
    """The definition's answer on a sample of one case, computed once and compared with every provider's answer.

    do: the incoming gradient of o for the check, (B, T, H, Dv); None to check the forward alone.
    """

    def __init__(self, case: Case, inputs: Inputs, *, needs_grad: bool) -> None:
        q, v = inputs.tensors[0], inputs.tensors[2]
        self.parts = _parts(case, q.device)
        self.do: Tensor | None = None
        if needs_grad:
            o_shape = (*q.shape[:-1], v.shape[-1])
            generator = torch.Generator(q.device).manual_seed(1)
            self.do = torch.zeros(o_shape, dtype=q.dtype, device=q.device)
            for part in self.parts:
                for rows in part.rows:
                    there = part.queries_of(self.do)[:, rows]
                    there.copy_(torch.randn(there.shape, generator=generator, device=q.device))
        self._answers = [
            [_definition(case, inputs, part, self.do, dtype) for dtype in (torch.float64, DTYPES[case.dtype])]
            for part in self.parts
        ]

    def errors(self, found: dict[str, Tensor]) -> dict[str, float]:
        """|x - exact| / |exact| (Frobenius) of "o", "dq", "dk", "dv", for the worst part. NaN counts as infinite."""
        worst: dict[str, float] = {}
        for part, (exact, _) in zip(self.parts, self._answers, strict=True):
            for name, x in _cut(part, found).items():
                norm = exact[name].norm().item()
                error = (x.double() - exact[name]).norm().item() / (norm or 1.0)
                worst[name] = max(worst.get(name, 0.0), error if math.isfinite(error) else math.inf)
        return worst

    def complaint(self, found: dict[str, Tensor]) -> str | None:
        """A sentence on the first tensor that exceeds the tolerance; None if none does."""
        for part, (exact, plain) in zip(self.parts, self._answers, strict=True):
            # where terms cancel, the rounding of the terms remains, which are summed in fp32 at best
            floor = torch.finfo(torch.float32).eps * max(_largest(x.abs()) for x in exact.values())
            for name, x in _cut(part, found).items():
                difference, allowed = (x.double() - exact[name]).abs(), (plain[name].double() - exact[name]).abs()
                ulp = torch.finfo(x.dtype).eps * exact[name].abs()
                for word, of in (("max", _largest), ("mean", _mean)):
                    error, limit = of(difference), 2 * of(allowed) + 8 * max(of(ulp), floor)
                    if not error <= limit:
                        return f"{name} is off by {error:.2e} ({word}) from the fp64 definition; {limit:.2e} is allowed"
        return None


def _largest(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0


def _mean(x: Tensor) -> float:
    return x.mean().item() if x.numel() else 0.0


def _cut(part: Part, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part of each tensor for which the definition was computed."""
    shown = {}
    for name, x in found.items():
        if name in ("o", "dq"):
            shown[name] = torch.cat([part.queries_of(x.detach())[:, rows] for rows in part.rows], dim=1)
        else:
            shown[name] = part.keys_of(x.detach())
    return shown


def _parts(case: Case, device: torch.device) -> list[Part]:
    sizes = case.problem().sizes
    lengths = sizes.sequences
    # the longest sequence of a packed batch; the first and the last of a dense batch, with its first and last heads
    if case.lengths:
        sequences = [max(range(len(lengths)), key=lambda b: math.prod(lengths[b]))]
    else:
        sequences = sorted({0, sizes.B - 1}) if sizes.B else []
    starts = [[0, *(sum(pair[axis] for pair in lengths[: b + 1]) for b in range(len(lengths)))] for axis in (0, 1)]
    parts = []
    for number, b in enumerate(sequences):
        T, S = lengths[b]
        group = sizes.H // sizes.Hk
        head = 0 if number == 0 and len(sequences) > 1 else sizes.Hk - 1
        heads, key_heads = slice(head * group, (head + 1) * group), slice(head, head + 1)
        if case.dropout:
            # the definition's weights are drawn by head, so all heads take part
            heads, key_heads, group = slice(None), slice(None), sizes.H
        rows = _row_blocks(T, S, group, WHOLE[device.type], case)
        queries, keys = (slice(*list(pairwise(axis))[b]) if case.lengths else slice(None) for axis in starts)
        parts.append(Part(b, heads, key_heads, queries, keys, rows))
    return parts


def _row_blocks(T: int, S: int, heads: int, whole: int, case: Case) -> tuple[slice, ...]:
    if T * S * heads <= whole:
        step = T if case.dropout else max(CHUNK // max(S * heads, 1), 1)
        # a sequence without queries has one empty block
        return tuple(slice(t, min(t + step, T)) for t in range(0, max(T, 1), max(step, 1)))
    if case.dropout:
        raise Unsupported(f"{case.name} has dropout and {T * S * heads:,} scores per sequence; its check takes {whole:,}")
    middle = T // 2 - BLOCK // 2 + 1
    return tuple(slice(max(t, 0), min(max(t, 0) + BLOCK, T)) for t in (0, middle, T - BLOCK))


def _definition(case: Case, inputs: Inputs, part: Part, do: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """o and the gradients of one part in `dtype`: o and dq on its rows, dk and dv whole."""
    q, k, v = (x.detach() for x in inputs.tensors[:3])
    q, k, v = part.queries_of(q).to(dtype), part.keys_of(k).to(dtype), part.keys_of(v).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    options = inputs.options
    sinks = options["sinks"].detach()[part.heads].to(dtype) if "sinks" in options else None
    seed = torch.tensor([options["seed"]], device=q.device) if "seed" in options else None
    outs, dqs = [], []
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows in part.rows:
        leaves = q_rows, keys, values = [x.clone().requires_grad_(do is not None) for x in (q[:, rows], k, v)]
        with torch.set_grad_enabled(do is not None):
            o, _ = reference.attention(
                q_rows, keys, values, FULL,
                scale=case.scale, softcap=case.softcap, bias=_added(case, inputs, part, rows, dtype), sinks=sinks,
                dropout=case.dropout, seed=seed, batch=part.batch,
            )  # fmt: skip
        outs.append(o.detach())
        if do is not None:
            found = torch.autograd.grad(o, leaves, part.queries_of(do)[:, rows].to(dtype))
            dqs.append(found[0])
            dk += found[1]
            dv += found[2]
    answer = {"o": torch.cat(outs, dim=1)}
    return answer if do is None else answer | {"dq": torch.cat(dqs, dim=1), "dk": dk, "dv": dv}


def _added(case: Case, inputs: Inputs, part: Part, rows: slice, dtype: torch.dtype) -> Tensor:
    """The terms added to the scores of some rows: bias, ALiBi, and -inf where the mask hides. (1, heads, rows, S)."""
    T, S = case.problem().sizes.sequences[part.batch]
    device = inputs.tensors[0].device
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] + (S - T)
    j = torch.arange(S, device=device)
    added = torch.zeros((1, 1, rows.stop - rows.start, S), dtype=dtype, device=device)
    bias = inputs.options.get("bias")
    if bias is not None:
        added = added + _bias_of(bias.detach(), part, rows, S).to(dtype)
    if case.alibi:
        slopes = inputs.options["alibi"][part.heads].to(dtype)
        added = added - slopes[:, None, None] * (i - j).abs().to(dtype)
    visible = (j >= case.mask.first_key(i)) & (j <= case.mask.last_key(i))
    return added.masked_fill(~visible, -math.inf)


def _bias_of(bias: Tensor, part: Part, rows: slice, S: int) -> Tensor:
    """The bias of some rows: each axis that it has is cut, the others keep the size one."""
    if bias.ndim == 4:
        bias = bias[part.batch if bias.shape[0] > 1 else 0]
    if bias.shape[0] > 1:
        bias = bias[part.heads]
    if bias.shape[1] > 1:
        start = part.queries.start or 0
        bias = bias[:, start + rows.start : start + rows.stop]
    return bias[None, ..., :S]
