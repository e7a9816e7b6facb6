"""The operator of attention between gathered rows, and what runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.gathered import plain
from rooftile.approximate.gathered.lists import RowLists
from rooftile.runtime.devices import arch, lack_of_kernels
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import below_autograd, define, wants_grad, watched

LARGEST_DIM = 128
# the loop over the other rounds of a pair is unrolled
MOST_ROUNDS = 8

Results = tuple[Tensor, Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, lists: RowLists, *, scale: float, backend: str = "auto") -> Tensor:
    """Exact softmax over the pairs that the lists show.

    Args:
        q: queries (B, T, H, D), the last T of S tokens.
        k: keys (B, S, Hk, D).
        v: values (B, S, Hv, Dv). Hk and Hv divide H.
        lists: the rows of each group, constants in the backward.
        scale: of the scores.
        backend: "auto" takes the kernels where they run, "plain" PyTorch's operations.

    Returns:
        o (B, T, H, Dv). Under "chunks" and "window" one softmax over all rounds, in which a pair weighs 1 / N_ij if the lists
        have marks; a row that sees nothing gives its own value (T = S). Under "lists" the mean of a row over its groups, 0
        without one.

    The operator also returns what the backward reads: lse (B, T, H, 2), -inf for a row that sees nothing, and no tensor
    beside it; under "lists" the lse (B, H, N, 2) and outputs (B, H, N, Dv) of each position of the list. An lse is two numbers,
    itself and what its rounding lost: in log2 with the kernels, natural with PyTorch's operations.
    """
    words = (lists.marks, lists.lows, scale, lists.width, lists.key_width, _kind(lists), backend)
    arguments = (q, k, v, lists.rows, lists.keys, *words)
    if torch.compiler.is_compiling() or watched(*arguments):
        return gathered_attention(*arguments)[0]
    if wants_grad(q, k, v):
        return _Gathered.apply(*arguments)[0]
    return _run(*arguments)[0]


def refusal(q: Tensor, v: Tensor, rounds: int = 1) -> str | None:
    """Why the kernels do not run such a call, or None: what came; what they have."""
    if lack := lack_of_kernels(arch(q.device)):
        return lack
    if q.dtype == torch.float64:
        return "float64; has float32, bfloat16, float16"
    if max(q.shape[-1], v.shape[-1]) > LARGEST_DIM:
        return f"head dims {q.shape[-1]}, {v.shape[-1]}; has up to {LARGEST_DIM}"
    if rounds > MOST_ROUNDS:
        return f"{rounds} rounds whose pairs count once; has up to {MOST_ROUNDS}"
    return None


def _kind(lists: RowLists) -> str:
    return f"{lists.kind} causal" if lists.causal else lists.kind


def _prepared(q: Tensor, v: Tensor, backend: str, *rest: Any) -> tuple[RowLists, Any]:
    """The lists of an operator's arguments, and the module that runs them."""
    rows, keys, marks, lows, width, key_width, kind = rest
    name, _, causal = kind.partition(" ")
    lists = RowLists(rows, keys, marks, lows, width, key_width, name, causal == "causal")
    if backend == "plain" or refusal(q, v, 1 if marks is None else marks.shape[1]) is not None:
        return lists, plain
    from rooftile.approximate.gathered import kernels

    marks, lows = (x if x is None else x.contiguous() for x in (marks, lows))
    return lists._replace(rows=rows.contiguous(), keys=keys.contiguous(), marks=marks, lows=lows), kernels


def _run(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, marks: Tensor | None, lows: Tensor | None, scale: float,
    width: int, key_width: int, kind: str, backend: str,
) -> Results:  # fmt: skip
    lists, module = _prepared(q, v, backend, rows, keys, marks, lows, width, key_width, kind)
    with device_of(q), torch.autocast(q.device.type, enabled=False):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return module.forward(q, k, v, lists, scale)


def _run_backward(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, marks: Tensor | None,
    lows: Tensor | None, scale: float, width: int, key_width: int, kind: str, backend: str,
) -> Results:  # fmt: skip
    lists, module = _prepared(q, v, backend, rows, keys, marks, lows, width, key_width, kind)
    with device_of(q), torch.autocast(q.device.type, enabled=False):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return module.backward(do.contiguous(), o.contiguous(), lse.contiguous(), q, k, v, lists, scale)


def _fake(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *others: Any) -> Results:
    wide, kind = torch.promote_types(q.dtype, torch.float32), others[-2]
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    if not kind.startswith("lists"):
        return o, q.new_empty(*q.shape[:3], 2, dtype=wide), q.new_empty(0)
    return o, q.new_empty(*rows.shape[1:], 2, dtype=wide), q.new_empty(*rows.shape[1:], v.shape[-1])


def _fake_backward(do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Results:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, *rest: Any) -> Results:
        marks, lows, *words = rest
        run = gathered_attention if watched(q, k, v, rows) else _run
        with below_autograd():
            o, lse, parts = run(q, k, v, rows, keys, *rest)
        ctx.mark_non_differentiable(lse, parts)
        joins = not words[3].startswith("lists")
        ctx.save_for_backward(o if joins else parts, lse, q, k, v, rows, keys, marks, lows)
        ctx.words = words
        return o, lse, parts

    @staticmethod
    def backward(ctx: Any, do: Tensor, *unused: Any) -> Any:
        saved = ctx.saved_tensors
        run = gathered_attention_backward if torch.is_grad_enabled() or watched(do, *saved) else _run_backward
        return *run(do, *saved, *ctx.words), *[None] * 9


gathered_attention = define(
    "gathered_attention(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor keys, Tensor? marks, Tensor? lows, float scale, "
    "int width, int key_width, str kind, str backend) -> (Tensor, Tensor, Tensor)",
    _run, _fake, _Gathered.apply, has_gradient=(0, 1, 2),
)  # fmt: skip
gathered_attention_backward = define(
    "gathered_attention_backward(Tensor do, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor rows, Tensor keys, "
    "Tensor? marks, Tensor? lows, float scale, int width, int key_width, str kind, str backend) -> (Tensor, Tensor, Tensor)",
    _run_backward, _fake_backward,
)  # fmt: skip
