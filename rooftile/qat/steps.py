"""Counts the steps of optimisers for the modules whose weights they hold.

A layer keeps its codes from one step to the next. A tensor's version does not tell it that the weight was changed: FSDP fills a
weight again without raising it, and so does a program that writes to `.data`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_COUNTING: WeakSet[Any] = WeakSet()
_HOOKS: list[Any] = []


def count(module: nn.Module) -> None:
    """Adds one to `module.qat.steps` after each step of an optimiser that holds its weight, as long as the module lives."""
    _COUNTING.add(module)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for module in _COUNTING:
        if "qat" in vars(module) and id(module.weight) in held:
            module.qat.steps += 1
