"""Counts the steps of optimisers for the modules whose weights they hold, and does what comes before and after a step.

A layer keeps its codes from one step to the next. A tensor's version does not tell it that the weight was changed: FSDP fills a
weight again without raising it, and so does a program that writes to `.data`.

Before a step, 2:4 layers add their decay to the gradient: once, however many micro-batches it was summed over. After it they
choose their masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rooftile.qat import masking

_COUNTING: WeakSet[Any] = WeakSet()
_HOOKS: list[Any] = []


def count(module: nn.Module) -> None:
    """Counts a step of `module.qat` after each step of an optimiser that holds its weight, as long as the module lives."""
    _COUNTING.add(module)
    if not _HOOKS:
        _HOOKS.extend((register_optimizer_step_pre_hook(_stepping), register_optimizer_step_post_hook(_stepped)))


def _held(optimizer: Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the modules whose weights an optimiser holds, with the group of each."""
    groups = {id(x): group for group in optimizer.param_groups for x in group["params"]}
    for module in list(_COUNTING):
        if "qat" in vars(module) and id(module.weight) in groups:
            yield module, groups[id(module.weight)]


def _stepping(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(module.qat.masking for module, _ in _held(optimizer)):
        return None
    closure = kwargs.get("closure") or next((x for x in args[1:] if callable(x)), None)
    if closure is None:
        _decay(optimizer)
        return None
    with_decay = _then(closure, optimizer)
    if "closure" in kwargs:
        return args, kwargs | {"closure": with_decay}
    return tuple(with_decay if x is closure else x for x in args), kwargs


def _then(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """A closure that computes gradients, and then adds the decay."""

    def run() -> Any:
        loss = closure()
        _decay(optimizer)
        return loss

    return run


def _decay(optimizer: Optimizer) -> None:
    # a gradient scaler leaves its scale here for optimisers that unscale in their own kernel
    scale = getattr(optimizer, "grad_scale", None)
    # layers may share a weight, whose gradient is one
    decayed: set[int] = set()
    for module, group in _held(optimizer):
        if module.qat.masking and module.rounds and id(module.weight) not in decayed:
            decayed.add(id(module.weight))
            masking.decay(module, (-1.0 if group.get("maximize") else 1.0) * (1.0 if scale is None else scale))


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for module, _ in _held(optimizer):
        module.qat.reach(module.qat.steps + 1)
        if module.qat.masking:
            masking.follow(module)
