"""A mask of Transformers that is a pattern until somebody computes with it.

`transformers_mask.mask` decides once what a query sees, and this tensor carries the decision to `transformers.attention`. To a
model it is the tensor (B, 1, T, S) that eager attention adds to its scores: as soon as the model slices it, adds to it or reads
it, it computes with exactly those numbers. Until then it takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import Mask


class Decision(NamedTuple):
    """Says what the queries of one mask see."""

    pattern: Mask
    # (B, S) int32: the sequence of each key slot, from 1; 0 for padding, -1 for an unwritten slot of a static cache. The queries
    # are the last T written slots, or all see every sequence's keys if `of_keys_only`. None: nothing is padded or packed
    sequences: Tensor | None
    of_keys_only: bool
    # builds the tensor that eager attention adds
    dense: Callable[[], Tensor]


class LazyMask(Tensor):
    """A `Decision` in the shape, dtype and device of the dense mask; every operation on it sees that mask."""

    decision: Decision
    # results that later layers ask for again, by name
    kept: dict[Any, Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func in _OF_METADATA:
            # under a mode Dynamo comes back here with subclasses alone disabled
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to and isinstance(args[0], LazyMask):
                moved = _moved(args[0], *args[1:], **kwargs)
                if moved is not None:
                    return moved
            if func is Tensor.detach:
                return args[0]
            return func(*_dense(args), **_dense(kwargs))


def lazy(decision: Decision, shape: tuple[int, int, int, int], dtype: torch.dtype, device: Any) -> Tensor:
    """Returns the mask (B, 1, T, S) of a decision: a LazyMask, or a dense one under modes that make their own tensors."""
    number = torch.empty((), dtype=dtype, device=device)
    if type(number) is not Tensor:
        # fake tensors of an export cannot be of a second class
        return decision.dense()
    mask = number.expand(shape).as_subclass(LazyMask)
    mask.decision = decision
    mask.kept = {} if torch.compiler.is_compiling() else {"shape": shape}
    return mask


def shape_of(mask: LazyMask) -> tuple[int, ...]:
    """Returns (B, 1, T, S) without the detour that each of the tensor's own attributes takes, once per layer."""
    # a graph takes no plain numbers, which it would be compiled for
    return tuple(mask.shape) if torch.compiler.is_compiling() else mask.kept["shape"]


def dense_of(mask: LazyMask) -> Tensor:
    """Returns the tensor that eager attention adds to the scores, made once."""
    if torch.compiler.is_compiling():
        return mask.decision.dense()
    if "dense" not in mask.kept:
        mask.kept["dense"] = mask.decision.dense()
    return mask.kept["dense"]  # type: ignore[no-any-return]


_OF_METADATA = {
    *(getattr(Tensor, name).__get__ for name in (
        "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse", "layout", "ndim",
        "requires_grad", "shape",
    )),
    *(getattr(Tensor, name) for name in (
        "__len__", "dim", "get_device", "is_complex", "is_floating_point", "is_inference", "ndimension", "numel", "nelement",
        "size", "storage_offset", "stride",
    )),
}  # fmt: skip


def _moved(mask: LazyMask, *where: Any, **options: Any) -> Tensor | None:
    """Returns the mask in another floating dtype or on another device; None if the result would be no mask."""
    like = torch.empty((), dtype=mask.dtype, device=mask.device).to(*where, **options)
    if not like.is_floating_point():
        return None
    decision, dense = mask.decision, mask.decision.dense
    sequences = None if decision.sequences is None else decision.sequences.to(like.device)
    decision = decision._replace(sequences=sequences, dense=lambda: dense().to(like.device, like.dtype))
    return lazy(decision, tuple(mask.shape), like.dtype, like.device)  # type: ignore[arg-type]


def _dense(given: Any) -> Any:
    if isinstance(given, LazyMask):
        return dense_of(given)
    if isinstance(given, dict):
        return {name: _dense(value) for name, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(map(_dense, given))
    return given
