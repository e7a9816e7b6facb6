"""Counts the steps of optimisers for the modules whose weights they hold, and refuses those that lack learned scales.

A layer keeps its codes from one step to the next. A tensor's version does not tell it that the weight was changed: FSDP fills a
weight again without raising it, and so does a program that writes to `.data`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rooftile.errors import InvalidInput
from rooftile.qat.learned import LEAST, first_scales
from rooftile.qat.sharded import local

_COUNTING: WeakSet[Any] = WeakSet()
_HOOKS: list[Any] = []


def count(module: nn.Module) -> None:
    """Adds one to `module.qat.steps` after each step of an optimiser that holds its weight, as long as the module lives."""
    _COUNTING.add(module)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_check))
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses an optimiser of a weight whose scales no optimiser holds: one that was made before `prepare`."""
    held = _held(optimizer)
    lacking = []
    for module in _COUNTING:
        if "qat" not in vars(module) or module.scales is None or not module.scales.requires_grad:
            continue
        if id(module.scales) in held:
            module.qat.learns = True
        elif id(module.weight) in held and not module.qat.learns:
            lacking.append(module.qat.name)
    if lacking:
        name = min(lacking)
        raise InvalidInput(
            f"the optimiser holds {name}.weight and not its scales, {name}.weight_scale, which \"lsq\" learns; make it after "
            "prepare, from model.parameters()"
        )


@torch.no_grad()
def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = _held(optimizer)
    for module in _COUNTING:
        if "qat" not in vars(module):
            continue
        if id(module.weight) in held:
            module.qat.steps += 1
            if module.scales is not None and module.qat.steps == module.qat.start_step:
                # rounding begins with the weights as they are now; FSDP shards rows, which scales share with their weights
                rounding = module.qat.rounding
                local(module.scales).copy_(first_scales(local(module.weight), rounding.format, rounding.group))
        if module.scales is not None and id(module.scales) in held:
            module.scales.clamp_(min=LEAST)


def _held(optimizer: Optimizer) -> set[int]:
    return {id(x) for group in optimizer.param_groups for x in group["params"]}
