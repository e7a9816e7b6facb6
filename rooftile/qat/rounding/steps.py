"""Counts the steps of optimisers for the modules whose weights they hold, and does what comes before and after a step.

A layer keeps its codes from one step to the next. A tensor's version does not tell it that the weight was changed: FSDP fills a
weight again without raising it, and so does a program that writes to `.data`.

Before a step, an optimiser that lacks learned scales is refused, weights that are not finite are told, and 2:4 layers add their
decay to the gradient: once, however many micro-batches it was summed over. After it they choose their masks, and learned scales
stay above zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rooftile.errors import InvalidInput
from rooftile.qat.rounding import finite, masking
from rooftile.qat.rounding.learned import LEAST, first_scales
from rooftile.qat.sharded import local


@runtime_checkable
class DecaysInside(Protocol):
    """An optimiser that adds the decay of 2:4 weights in its own pass, as `rooftile.optim.AdamW` does."""

    def decay_left_out(self, weight: Tensor, mask: Tensor, decay: float) -> None:
        """Decays what a mask leaves out of a weight at the next step."""


_COUNTING: WeakSet[Any] = WeakSet()
_HOOKS: list[Any] = []


def count(module: object) -> None:
    """Counts a step of `module.qat` after each step of an optimiser that holds its weight, as long as the module lives."""
    _COUNTING.add(module)
    if not _HOOKS:
        _HOOKS.extend((register_optimizer_step_pre_hook(_stepping), register_optimizer_step_post_hook(_stepped)))


def _groups(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    return {id(x): group for group in optimizer.param_groups for x in group["params"]}


def _prepared() -> list[Any]:
    return [module for module in _COUNTING if "qat" in vars(module)]


def _held(optimizer: Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the modules whose weights an optimiser holds, with the group of each."""
    groups = _groups(optimizer)
    return ((module, groups[id(module.parameter)]) for module in _prepared() if id(module.parameter) in groups)


def _stepping(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_scales(optimizer)
    held = _groups(optimizer)
    finite.read(optimizer, [module for module in _prepared() if id(module.parameter) in held or not module.qat.steps])
    if not any(module.qat.masking for module, _ in _held(optimizer)):
        return None
    if isinstance(optimizer, DecaysInside):
        for module, _ in _decaying(optimizer):
            optimizer.decay_left_out(module.parameter, module.mask, module.qat.masking.recipe.decay)
        return None
    closure = kwargs.get("closure") or next((x for x in args[1:] if callable(x)), None)
    if closure is None:
        _decay(optimizer)
        return None
    with_decay = _then(closure, optimizer)
    if "closure" in kwargs:
        return args, kwargs | {"closure": with_decay}
    return tuple(with_decay if x is closure else x for x in args), kwargs


def _check_scales(optimizer: Optimizer) -> None:
    """Refuses an optimiser of a weight whose scales no optimiser holds: one that was made before `prepare`."""
    held = _groups(optimizer)
    lacking = []
    for module in _prepared():
        if module.scales is None or not module.scales.requires_grad:
            continue
        if id(module.scales) in held:
            module.qat.learns = True
        elif id(module.parameter) in held and not module.qat.learns:
            lacking.append(module.qat.name)
    if lacking:
        name = min(lacking)
        raise InvalidInput(
            f'the optimiser holds {name}.weight and not its scales, {name}.weight_scale, which "lsq" learns; make it after '
            "prepare, from model.parameters()"
        )


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
    for module, group in _decaying(optimizer):
        masking.decay(module, (-1.0 if group.get("maximize") else 1.0) * (1.0 if scale is None else scale))


def _decaying(optimizer: Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the 2:4 modules that decay, each weight once: layers may share one, whose gradient is one."""
    decayed: set[int] = set()
    for module, group in _held(optimizer):
        if module.qat.masking and module.qat.masking.recipe.decay and module.rounds and id(module.parameter) not in decayed:
            decayed.add(id(module.parameter))
            yield module, group


@torch.no_grad()
def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for module, _ in _held(optimizer):
        module.qat.reach(module.qat.steps + 1)
        if module.qat.masking:
            masking.follow(module)
        if module.scales is not None and module.qat.steps == module.qat.start_step:
            # rounding begins with the weights as they are now; FSDP shards rows, which scales share with their weights
            rounding = module.qat.rounding
            local(module.scales).copy_(first_scales(local(module.parameter), rounding.format, rounding.group))
    held = _groups(optimizer)
    for module in _prepared():
        if module.scales is not None and id(module.scales) in held:
            module.scales.clamp_(min=LEAST)
