"""Cross-entropy from hidden states and the head's weights: logits exist for some rows at a time.

Under "mean" and "sum" the upstream gradient is one number, so the forward makes gradients while it has the logits, and the
backward multiplies them by that number: 6 T V D FLOPs. Under "none" each row has its own, so the backward makes the logits
again: 8 T V D.

Every entry of the gradient counts, the gradient of the weights is summed in fp32 and rounded once, and nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rooftile.errors import InvalidInput, Unsupported
from rooftile.fused import split_vocabulary
from rooftile.fused.chunks import takes_less_whole
from rooftile.fused.differentiable import in_transform
from rooftile.fused.linear_loss_operators import LINEAR_CROSS_ENTROPY, REDUCED
from rooftile.fused.loss import CROSS_ENTROPY, Reduction, check, counted, reduced
from rooftile.fused.split_loss import Parts, agree, parts_of, total
from rooftile.fused.where import check_floats
from rooftile.numerics.quantised_rows import as_rows
from rooftile.runtime.operators import wants_grad
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, ignore_index: int = -100,
    reduction: Reduction = "mean", label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    shift: bool = False, group: Any = None, split: str | tuple[str, ...] | None = None, vocabulary: int | None = None,
    validate: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits input linear_weight^T + linear_bias, of which only some rows exist at once.

    Under "mean" and "sum" the forward computes the gradients too, where some are wanted; call it under torch.no_grad() for a loss
    alone. Under autocast it computes in autocast's dtype, as `torch.nn.Linear` does.

    Args:
        input: (..., D) hidden states, such as (B, T, D).
        linear_weight: (V, D).
        target: (...) int64.
        linear_bias: (V,).
        ignore_index, reduction, label_smoothing, softcap, z_loss: as in `cross_entropy`.
        shift: whether each token predicts the target of the next: the last token and the first target of each sequence, the axis
            before D, are left out.
        group: the ranks that share the loss: a process group or a DeviceMesh. Every rank of it calls this.
        split: "tokens" where each rank has its own tokens and the whole weight; "vocabulary" where each has its own rows of the
            weight and bias, in the order of the ranks, and all have the same input and target, which counts rows of the whole
            vocabulary; a tuple of both for the dimensions of a two-dimensional mesh, such as ("tokens", "vocabulary").
        vocabulary: the rows of all ranks together, where the ranks may differ in theirs. None: every rank has as many.
        validate: check over the group that every rank was given the same problem; costs a small all-gather.

    With a group the loss is that of all tokens and the whole vocabulary, the same number on every rank: sums and counts are added
    up before the division. No logits are sent. The gradient of `input` is whole on every rank: with a split vocabulary it is
    summed over the ranks here, so no further all-reduce is due. The weight and the bias have whole gradients of their own rows
    from this rank's tokens; where tokens are split, the sum over the group is the whole, as in data parallel training (where DDP
    or FSDP takes the mean, multiply the loss by the number of ranks).

    Raises:
        InvalidInput: shapes, targets, or a group and its split do not go together.
        Unsupported: with a group, DTensors, torch.func and `shift` of split tokens; with a split vocabulary, second derivatives.

    Example:
        >>> x, w, target = torch.randn(5, 16), torch.randn(100, 16, requires_grad=True), torch.randint(100, (5,))
        >>> linear_cross_entropy(x, w, target).backward()
        >>> linear_cross_entropy(x, w, target, group=mesh["cp"], split="tokens").backward()      # doctest: +SKIP
    """
    _check(input, linear_weight, linear_bias, shift)
    parts = None
    if group is not None or split is not None or vocabulary is not None:
        from rooftile.runtime.uncompiled import uncompiled

        # torch.compile may look at no member of a process group
        parts = uncompiled(parts_of, (group, split, vocabulary, input, linear_weight, (target, linear_bias)))
    if shift and parts is not None and parts.tokens is not None:
        raise Unsupported(
            "shift of split tokens, whose next token may be another rank's; shift the targets, then take this rank's"
        )
    if shift and isinstance(target, Tensor) and target.shape == input.shape[:-1]:
        input, target = input[..., :-1, :], target[..., 1:]
    V = linear_weight.shape[0] if parts is None else parts.V
    check(input, V, target, ignore_index, reduction, label_smoothing, softcap)
    numbers = (ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss))
    rows, targets = as_rows(input), target.reshape(-1)
    tensors = tuple(_as_autocast(rows, linear_weight, linear_bias))
    if not tensors[0].dtype == tensors[1].dtype == (tensors[0] if tensors[2] is None else tensors[2]).dtype:
        dtypes = f"input is {tensors[0].dtype} and linear_weight {tensors[1].dtype}"
        raise InvalidInput(f"{dtypes}{'' if linear_bias is None else f', linear_bias {tensors[2].dtype}'}; must be alike")
    if parts is None:
        found = _loss(tensors, targets, counted(targets, ignore_index, reduction), numbers, reduction)
    else:
        found = uncompiled(_loss_over_ranks, (tensors, targets, numbers, reduction, parts, validate))
    return found.reshape(target.shape) if reduction == "none" else found


def _loss(tensors: Any, targets: Tensor, count: Tensor | None, numbers: tuple[Any, ...], reduction: str) -> Tensor:
    """The loss of tokens under a whole vocabulary: their sum, divided by `count` where there is one, or their losses."""
    wanted = [x is not None and x.requires_grad for x in tensors]
    if any(wanted) and wants_grad(*tensors) and takes_less_whole(*tensors[:2], *wanted[:2]):
        losses, _ = CROSS_ENTROPY(functional.linear(*tensors), targets, *numbers)
    # gradients of fp16 would be too small before they are multiplied by a scaled loss
    elif reduction != "none" and tensors[0].dtype != torch.float16 and not in_transform() and wants_grad(*tensors):
        return REDUCED(*tensors, targets, count, *numbers, *wanted)[0]
    else:
        losses, _ = LINEAR_CROSS_ENTROPY(*tensors, targets, *numbers)
    return reduced(losses, count, reduction)


def _loss_over_ranks(
    tensors: Any, targets: Tensor, numbers: tuple[Any, ...], reduction: str, parts: Parts, validate: bool
) -> Tensor:  # fmt: skip
    wanted = tuple(x is not None and wants_grad(x) for x in tensors)
    if validate:
        agree(parts, tensors, targets, (numbers, reduction, wanted))
    count = counted(targets, numbers[0], reduction)
    if count is not None and parts.tokens is not None:
        dist.all_reduce(count, group=parts.tokens.group)
    if parts.vocabulary is None:
        found = _loss(tensors, targets, count, numbers, reduction)
    else:
        found = split_vocabulary.losses(tensors, targets, count, numbers, parts, reduction, wanted)
    return found if reduction == "none" else total(found, parts.tokens)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, shift: bool) -> None:
    check_floats(input=input, linear_weight=weight, **({} if bias is None else {"linear_bias": bias}))
    if input.ndim < 1 + shift or weight.ndim != 2 or input.shape[-1] != weight.shape[1]:
        due = "(..., T, D) and (V, D), to shift along T" if shift else "(..., D) and (V, D)"
        raise InvalidInput(f"input is {tuple(input.shape)} and linear_weight {tuple(weight.shape)}; must be {due}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InvalidInput(f"linear_bias is {tuple(bias.shape)}; must be ({weight.shape[0]},)")


def _as_autocast(*tensors: Tensor | None) -> Iterator[Any]:
    device = tensors[0].device.type if tensors[0] is not None else "cpu"
    cast = torch.is_autocast_enabled(device)
    for x in tensors:
        yield x.to(torch.get_autocast_dtype(device)) if cast and x is not None and x.dtype != torch.float64 else x
