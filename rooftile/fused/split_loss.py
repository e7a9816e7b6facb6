"""A loss over ranks: which of them holds what, and the sum over those that hold other tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.fused.differentiable import in_transform
from rooftile.runtime.arguments import shown, whole
from rooftile.runtime.ranks import Ranks, check_agreement, check_device, ranks_of

SPLITS = ("tokens", "vocabulary")


@dataclass(frozen=True, slots=True)
class Parts:
    """The ranks that hold other tokens, those that hold other rows of the weight, and the rows of the whole vocabulary."""

    tokens: Ranks | None
    vocabulary: Ranks | None
    V: int
    # every rank has as many rows
    even: bool = True

    @property
    def rows(self) -> int:
        """The rows of a rank that has most of an even split, from which all ranks compute the same chunks."""
        return -(-self.V // self.vocabulary.count) if self.vocabulary else self.V


def parts_of(group: Any, split: Any, vocabulary: Any, input: Tensor, weight: Tensor, others: tuple[Any, ...]) -> Parts:
    """Returns the parts that a caller named.

    Raises:
        InvalidInput: they do not go together, or a tensor is on a device that the group does not serve.
        Unsupported: a tensor is a DTensor, or a transform of torch.func is active.
    """
    held = _held(group, split)
    for name, x in (("input", input), ("linear_weight", weight), *zip(("target", "linear_bias"), others, strict=True)):
        if hasattr(x, "to_local"):
            raise Unsupported(f"{name} is a DTensor; linear_cross_entropy with group= takes this rank's part: {name}.to_local()")
    for ranks in held.values():
        check_device("input", input, ranks)
    if in_transform():
        raise Unsupported(
            "linear_cross_entropy with group= under torch.func; has autograd: call backward(), or torch.autograd.grad"
        )
    V, parts = weight.shape[0], held.get("vocabulary")
    if parts is None and vocabulary is not None:
        raise InvalidInput(
            f"vocabulary is {shown(vocabulary)} and split {split!r}; it is for a vocabulary that is split: leave it out"
        )
    if parts is None:
        return Parts(held.get("tokens"), None, V)
    if vocabulary is None:
        return Parts(held.get("tokens"), parts, V * parts.count)
    size = whole(vocabulary)
    if size is None or size < V:
        raise InvalidInput(
            f"vocabulary is {shown(vocabulary)} and this rank has {V} rows of it; must be the number of all ranks' rows together"
        )
    return Parts(held.get("tokens"), parts, size, even=False)


def _held(group: Any, split: Any) -> dict[str, Ranks]:
    """Returns the ranks for each name in `split`, one for each dimension of a mesh."""
    names = (split,) if isinstance(split, str) else split
    if not isinstance(names, tuple | list) or not names or len(set(names)) < len(names) or not set(names) <= set(SPLITS):
        raise InvalidInput(
            f"split is {shown(split)} and group {shown(group)}; split must be 'tokens', 'vocabulary', or a tuple of both for the "
            "two dimensions of a mesh"
        )
    if group is None:
        raise InvalidInput(f"split is {shown(split)} and group is None; pass the group, as in group=mesh['cp']")
    if len(names) == 1:
        return {names[0]: ranks_of(group)}
    if not hasattr(group, "get_group") or getattr(group, "ndim", None) != len(names):
        raise InvalidInput(f"split is {shown(split)} and group {shown(group)}; must be a mesh of {len(names)} dimensions")
    return {name: ranks_of(group.get_group(n)) for n, name in enumerate(names)}


def agree(parts: Parts, tensors: tuple[Tensor, Tensor, Tensor | None], target: Tensor, others: tuple[Any, ...]) -> None:
    """Raises InvalidInput on every rank if the ranks were given different problems. Waits for the device."""
    input, weight, bias = tensors
    known = (input.shape[1], str(input.dtype), bias is not None, parts.V, *others)
    if parts.vocabulary is not None:
        rows = weight.shape[0] if parts.even else None
        check_agreement(parts.vocabulary, (input.shape[0], _mark(target), rows, *known))
    if parts.tokens is not None:
        check_agreement(parts.tokens, known)


def _mark(target: Tensor) -> int:
    """Returns a number that targets in another order, or others, seldom have."""
    return int((target * torch.arange(1, len(target) + 1, device=target.device)).sum())


def total(x: Tensor, ranks: Ranks | None) -> Tensor:
    """Returns the sum over ranks that hold other tokens. Its gradient goes to each rank's own part as it is."""
    if ranks is None:
        return x
    found: Tensor = _Total.apply(x, ranks)
    return found


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        found = x.detach().clone()
        dist.all_reduce(found, group=ranks.group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
