"""Operators on lists of tensors, as optimisers call them: a part of the work is a part of each list."""

from __future__ import annotations

from typing import Any

import torch

from rooftile.diagnosis.experiments.call import RepeatableCall, operator_name

PREFIXES = ("_foreach_", "_fused_ada", "_fused_sgd")


def is_listed(call: RepeatableCall) -> bool:
    """Returns whether the operator takes lists whose tensors at one place belong together."""
    return operator_name(call.function).startswith(PREFIXES) and bool(call.args) and isinstance(call.args[0], list)


def of_lists(call: RepeatableCall, share: float) -> tuple[RepeatableCall, float]:
    """Returns the call on about a share of its elements, and the share: some of the tensors, or a part of the smallest.

    Example:
        >>> call = Call(torch.ops.aten._foreach_mul.Scalar, ([torch.ones(60), torch.ones(30), torch.ones(10)], 2.0))
        >>> smaller, share = of_lists(call, 0.5)
        >>> [x.numel() for x in smaller.tensors], share
        ([30, 10], 0.4)
    """
    sizes = [x.numel() for x in call.args[0]]
    left = share * sum(sizes)
    kept: list[int] = []
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        if sizes[n] <= left:
            kept.append(n)
            left -= sizes[n]
    rows: int | None = None
    if not kept:
        kept = [min(range(len(sizes)), key=lambda n: sizes[n])]
        x = call.args[0][kept[0]]
        if x.dim():
            rows = max(1, round(x.shape[0] * left / max(x.numel(), 1)))
    whole = call.args[0][kept[0]].shape

    def some(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(sizes):
            return value
        there = [value[n] for n in sorted(kept)]
        # a counter of steps beside the weights stays whole
        return [x[:rows] if rows is not None and isinstance(x, torch.Tensor) and x.shape == whole else x for x in there]

    args = tuple(some(value) for value in call.args)
    smaller = RepeatableCall(call.function, args, {name: some(value) for name, value in call.kwargs.items()})
    return smaller, sum(x.numel() for x in args[0]) / sum(sizes)
