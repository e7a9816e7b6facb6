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
from torch import Tensor
from torch.nn import functional

from rooftile.errors import InvalidInput
from rooftile.fused.chunks import Gradients, Logits, chunks, takes_less_whole
from rooftile.fused.differentiable import Operation, in_transform
from rooftile.fused.loss import CROSS_ENTROPY, NUMBERS, Reduction, check, defined, fake, gradient, gradients, reduced, run
from rooftile.fused.where import check_floats
from rooftile.numerics.quantised_rows import as_rows
from rooftile.runtime.operators import wants_grad
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, ignore_index: int = -100,
    reduction: Reduction = "mean", label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    shift: bool = False,
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

    Raises:
        InvalidInput: shapes or targets do not go together.

    Example:
        >>> x, w, target = torch.randn(5, 16), torch.randn(100, 16, requires_grad=True), torch.randint(100, (5,))
        >>> linear_cross_entropy(x, w, target).backward()
    """
    _check(input, linear_weight, linear_bias, shift)
    if shift and isinstance(target, Tensor) and target.shape == input.shape[:-1]:
        input, target = input[..., :-1, :], target[..., 1:]
    check(input, linear_weight.shape[0], target, ignore_index, reduction, label_smoothing, softcap)
    numbers = (ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss))
    rows, targets = as_rows(input), target.reshape(-1)
    leaves = *_as_autocast(rows, linear_weight, linear_bias), targets
    if not leaves[0].dtype == leaves[1].dtype == (leaves[0] if leaves[2] is None else leaves[2]).dtype:
        dtypes = f"input is {leaves[0].dtype} and linear_weight {leaves[1].dtype}"
        raise InvalidInput(f"{dtypes}{'' if linear_bias is None else f', linear_bias {leaves[2].dtype}'}; must be alike")
    wanted = [x is not None and x.requires_grad for x in leaves[:3]]
    if any(wanted) and wants_grad(*leaves[:3]) and takes_less_whole(*leaves[:2], *wanted[:2]):
        losses, _ = CROSS_ENTROPY(functional.linear(*leaves[:3]), targets, *numbers)
    # gradients of fp16 would be too small before they are multiplied by a scaled loss
    elif reduction != "none" and rows.dtype != torch.float16 and not in_transform() and wants_grad(*leaves[:3]):
        return _REDUCED(*leaves, *numbers, reduction == "mean", *wanted)[0]
    else:
        losses, _ = _LINEAR_CROSS_ENTROPY(*leaves, *numbers)
    return reduced(losses, targets, ignore_index, reduction).reshape(target.shape if reduction == "none" else ())


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


def _defined(input: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    return defined(functional.linear(input, weight, bias), *others)


def _run(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    losses, sums = fake(input)
    with torch.autocast(input.device.type, enabled=False):
        logits = Logits(input, weight, bias)
        for chunk in chunks(input, weight):
            losses[chunk], sums[chunk] = run(logits(chunk), target[chunk], *numbers)
    return losses, sums


def _gradients(
    dlosses: Tensor, losses: None, sums: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    *numbers: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """In plain operations, for derivatives of derivatives."""
    (dlogits,) = gradients(dlosses, None, sums, functional.linear(input, weight, bias), target, *numbers)
    db = dlogits.new_zeros(0) if bias is None else dlogits.sum(0).to(bias.dtype)
    return dlogits @ weight, dlogits.T @ input, db


def _run_gradients(
    dlosses: Tensor, losses: None, sums: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *numbers: Any
) -> tuple[Tensor, ...]:
    """Makes the logits again, some rows at a time."""
    found = Gradients(input, weight, bias)
    with torch.autocast(input.device.type, enabled=False):
        logits = Logits(input, weight, bias)
        for chunk in chunks(input, weight):
            z = logits(chunk)
            found.add(chunk, gradient(dlosses[chunk], sums[chunk], z, target[chunk], *numbers, into=z))
    return found.dx, found.dw.to(weight.dtype), found.db if bias is None else found.db.to(bias.dtype)


def _fake_gradients(d: Tensor, losses: Tensor, sums: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Any:
    db = sums.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return input.new_empty(input.shape), weight.new_empty(weight.shape), db


_LINEAR = "Tensor input, Tensor weight, Tensor? bias, Tensor target"
_LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy", f"{_LINEAR}, {NUMBERS}", results=2, run=_run, defined=_defined, run_gradients=_run_gradients,
    gradients=_gradients, fake=fake, fake_gradients=_fake_gradients, given_to={0: 0, 1: 1, 2: 2}, unused=frozenset((0,)),
)  # fmt: skip


def _reduced_defined(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *numbers, mean, _, _, _ = rest
    losses, _ = _defined(input, weight, bias, target, *numbers)
    loss = reduced(losses, target, numbers[0], "mean" if mean else "sum")
    return loss, *(loss.new_empty(0) for _ in range(3))


def _run_reduced(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss, and its gradients for an upstream gradient of one; dw and db in fp32."""
    *numbers, mean, wants_dx, wants_dw, wants_db = rest
    losses, sums = fake(input)
    found = Gradients(input, weight, bias, (wants_dx, wants_dw, wants_db))
    one = torch.ones((), dtype=losses.dtype, device=losses.device)
    share = one / (target != numbers[0]).sum() if mean else one
    with torch.autocast(input.device.type, enabled=False):
        logits = Logits(input, weight, bias)
        for chunk in chunks(input, weight):
            z, t = logits(chunk), target[chunk]
            losses[chunk], sums[chunk] = run(z, t, *numbers)
            found.add(chunk, gradient(share.expand(t.shape), sums[chunk], z, t, *numbers, into=z))
    return reduced(losses, target, numbers[0], "mean" if mean else "sum"), found.dx, found.dw, found.db


def _reduced_gradients(
    dloss: Tensor, loss: None, dx: None, dw: None, db: None, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *numbers, mean, _, _, _ = rest
    each = dloss / (target != numbers[0]).sum() if mean else dloss
    return _gradients(each.expand(target.shape), None, None, input, weight, bias, target, *numbers)


def _run_reduced_gradients(
    dloss: Tensor, loss: None, dx: Tensor, dw: Tensor, db: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    """Multiplies by the upstream gradient; each product is rounded once from fp32."""
    dtypes = input.dtype, weight.dtype, db.dtype if bias is None else bias.dtype
    return tuple(
        torch.mul(x, dloss, out=x.new_empty(x.shape, dtype=dtype)) for x, dtype in zip((dx, dw, db), dtypes, strict=True)
    )


def _fake_reduced(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, wants_dx, wants_dw, wants_db = rest
    wide = torch.promote_types(input.dtype, torch.float32)
    dx = input.new_empty(input.shape if wants_dx else 0)
    dw = weight.new_empty(weight.shape if wants_dw else 0, dtype=wide)
    db = weight.new_empty(weight.shape[0] if wants_db and bias is not None else 0, dtype=wide)
    return input.new_empty((), dtype=wide), dx, dw, db


def _fake_reduced_gradients(
    dloss: Tensor, loss: None, dx: Tensor, dw: Tensor, db: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    last = db.new_empty(db.shape) if bias is None else bias.new_empty(db.shape)
    return input.new_empty(dx.shape), weight.new_empty(dw.shape), last


_REDUCED = Operation(
    "linear_cross_entropy_reduced", f"{_LINEAR}, {NUMBERS}, bool mean, bool wants_dx, bool wants_dw, bool wants_db", results=4,
    run=_run_reduced, defined=_reduced_defined, run_gradients=_run_reduced_gradients, gradients=_reduced_gradients,
    fake=_fake_reduced, fake_gradients=_fake_reduced_gradients, given_to={0: 0, 1: 1, 2: 2}, unused=frozenset((0,)),
)  # fmt: skip
