"""The operators of `linear_cross_entropy`: some rows of logits at a time, forward and backward.

`LINEAR_CROSS_ENTROPY` makes the logits again in the backward. `REDUCED` makes gradients in the forward, for an upstream gradient
of one, and its backward multiplies them by the number that came.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused.chunks import Gradients, Logits, chunks, scaled
from rooftile.fused.differentiable import Operation
from rooftile.fused.loss import NUMBERS, defined, fake, gradient, gradients, reduced, run


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
LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy", f"{_LINEAR}, {NUMBERS}", results=2, run=_run, defined=_defined, run_gradients=_run_gradients,
    gradients=_gradients, fake=fake, fake_gradients=_fake_gradients, given_to={0: 0, 1: 1, 2: 2}, unused=frozenset((0,)),
)  # fmt: skip


def _reduced_defined(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, count: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    losses, _ = _defined(input, weight, bias, target, *rest[:4])
    loss = reduced(losses, count, "sum")
    return loss, *(loss.new_empty(0) for _ in range(3))


def _run_reduced(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, count: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss, and its gradients for an upstream gradient of one; dw and db in fp32."""
    *numbers, wants_dx, wants_dw, wants_db = rest
    losses, sums = fake(input)
    found = Gradients(input, weight, bias, (wants_dx, wants_dw, wants_db))
    share = losses.new_ones(()) if count is None else 1.0 / count.to(losses.dtype)
    with torch.autocast(input.device.type, enabled=False):
        logits = Logits(input, weight, bias)
        for chunk in chunks(input, weight):
            z, t = logits(chunk), target[chunk]
            losses[chunk], sums[chunk] = run(z, t, *numbers)
            found.add(chunk, gradient(share.expand(t.shape), sums[chunk], z, t, *numbers, into=z))
    return reduced(losses, count, "sum"), found.dx, found.dw, found.db


def _reduced_gradients(
    dloss: Tensor, loss: None, dx: None, dw: None, db: None, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    count: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    each = dloss if count is None else dloss / count
    return _gradients(each.expand(target.shape), None, None, input, weight, bias, target, *rest[:4])


def _run_reduced_gradients(
    dloss: Tensor, loss: None, dx: Tensor, dw: Tensor, db: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    """Multiplies by the upstream gradient; each product is rounded once from fp32."""
    dtypes = input.dtype, weight.dtype, db.dtype if bias is None else bias.dtype
    return tuple(scaled(x, dloss, dtype) for x, dtype in zip((dx, dw, db), dtypes, strict=True))


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


REDUCED = Operation(
    "linear_cross_entropy_reduced", f"{_LINEAR}, Tensor? count, {NUMBERS}, bool wants_dx, bool wants_dw, bool wants_db",
    results=4, run=_run_reduced, defined=_reduced_defined, run_gradients=_run_reduced_gradients, gradients=_reduced_gradients,
    fake=_fake_reduced, fake_gradients=_fake_reduced_gradients, given_to={0: 0, 1: 1, 2: 2}, unused=frozenset((0,)),
)  # fmt: skip
