"""Cross-entropy of logits; `rooftile.fused.linear_loss` has it from hidden states and the head's weights.

The loss of a row is lse - z_t for logits z and the target t, with label smoothing e: lse - (1 - e) z_t - e mean(z), and with a
z-loss besides a lse². Its gradient is p (1 + 2 a lse) - (1 - e) [t] - e / V. A softcap makes z = c tanh(x / c).

lse is kept as two numbers, the largest logit m and log l = log sum exp(z - m), and the loss is log l + (m - z_t). One
rounded number would lose log l where all logits of a row share a large offset, and with it the loss and the size of the gradient.

Nothing is approximated, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.fused import kernels
from rooftile.fused.differentiable import Operation
from rooftile.fused.where import check_floats, kernels_run_on
from rooftile.numerics.quantised_rows import as_rows
from rooftile.runtime.words import answers_foreign_words

Reduction = Literal["mean", "sum", "none"]
# logits that plain operations read at once: each takes fp32 copies of them
AT_ONCE, LEAST_AT_ONCE = 1 << 20, 1 << 16
# a target in another part of a vocabulary that several ranks hold
ELSEWHERE = -1


@answers_foreign_words
def cross_entropy(
    input: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean", label_smoothing: float = 0.0,
    softcap: float | None = None, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits, in fp32.

    Args:
        input: (..., V) logits.
        target: (...) int64, from 0 to V - 1, or ignore_index. On a GPU, where none is read, a target out of range gives NaN.
        ignore_index: rows with this target have no loss and no gradient.
        reduction: "mean" over the rows that count (NaN if none does, as in PyTorch), "sum" or "none".
        label_smoothing: from 0 to 1.
        softcap: logits become softcap * tanh(logits / softcap).
        z_loss: adds z_loss * lse² to each row.

    Raises:
        InvalidInput: shapes or targets do not go together.

    Example:
        >>> cross_entropy(torch.zeros(3, 8), torch.tensor([0, 1, 2]))
        tensor(2.0794)
    """
    check_floats(input=input)
    check(input, input.shape[-1], target, ignore_index, reduction, label_smoothing, softcap)
    rows, targets = as_rows(input), target.reshape(-1)
    losses, _ = CROSS_ENTROPY(rows, targets, ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss))
    found = reduced(losses, counted(targets, ignore_index, reduction), reduction)
    return found.reshape(target.shape) if reduction == "none" else found


def check(
    input: Tensor, V: int, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float, softcap: float | None
) -> None:  # fmt: skip
    """Raises `InvalidInput` if arguments of a loss do not go together, or if targets on a CPU are out of range."""
    if not isinstance(target, Tensor) or target.device != input.device:
        what = f"on {target.device}" if isinstance(target, Tensor) else type(target).__name__
        raise InvalidInput(f"target is {what}; must be a tensor of whole numbers on {input.device}, where input is")
    if V < 1:
        raise InvalidInput("there are no logits: V is 0; must be at least 1")
    if target.shape != input.shape[:-1] or target.dtype not in (torch.int64, torch.int32):
        shapes = f"target is {target.dtype} {tuple(target.shape)} and input {tuple(input.shape)}"
        raise InvalidInput(f"{shapes}; must be int64, one target for each row")
    if reduction not in ("mean", "sum", "none"):
        raise InvalidInput(f"reduction is {reduction!r}; must be mean, sum or none")
    if not 0 <= label_smoothing <= 1:
        raise InvalidInput(f"label_smoothing is {label_smoothing}; must be from 0 to 1")
    if softcap is not None and not softcap > 0:
        raise InvalidInput(f"softcap is {softcap}; must be above 0, or None")
    if target.device.type != "cpu" or torch.compiler.is_compiling() or _is_wrapped(target):
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= V))
    if wrong.any():
        raise InvalidInput(f"target holds {target[wrong][0].item()}; must be from 0 to {V - 1}, or ignore_index {ignore_index}")


def _is_wrapped(x: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x)) or type(x) not in (Tensor, torch.nn.Parameter)


def counted(target: Tensor, ignore_index: int, reduction: str) -> Tensor | None:
    """The number of rows that a mean is over, or None for another reduction."""
    return (target != ignore_index).sum() if reduction == "mean" else None


def reduced(losses: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    """The mean over rows that count, the sum, or the losses themselves."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if count is None else total / count


def defined(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses (rows,), and the largest logit and the log of the sum (rows, 2), in plain operations."""
    z = input if input.dtype == torch.float64 else input.float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    V = z.shape[-1]
    top, log = _sums(z)
    lse = top + log
    target = target.long()
    inside = (target >= 0) & (target < V)
    picked = z.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]
    losses = log + (1 - label_smoothing) * (top - picked) + z_loss * lse * lse
    if label_smoothing:
        losses = losses + label_smoothing * (top[:, None] - z).mean(-1)
    losses = torch.where(inside, losses, torch.nan)
    return torch.where(target == ignore_index, 0.0, losses), torch.stack([top, log], -1)


def _sums(z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of each row, as a constant, and log sum exp(z - it)."""
    top = z.detach().amax(-1)
    return top, (z - top[:, None]).exp().sum(-1).log()


def gradients(
    dlosses: Tensor, losses: None, sums: Tensor | None, input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float,
    softcap: float, z_loss: float, *, whole: int = 0,
) -> tuple[Tensor]:  # fmt: skip
    """The gradient of logits in plain operations. Where it may be differentiated again, the sums are computed from the logits.

    whole: the size of the vocabulary of which the logits are a part, 0 where they are all of it. In a part, a target may be
    `ELSEWHERE`.
    """
    x = input if input.dtype == torch.float64 else input.float()
    z = softcap * torch.tanh(x / softcap) if softcap else x
    V, target = x.shape[-1], target.long()
    # a second derivative needs them as functions of the logits; a part has sums of the whole
    again = sums is None or (torch.is_grad_enabled() and not whole)
    top, log = _sums(z) if again or sums is None else sums.unbind(-1)
    dz = (z - top[:, None] - log[:, None]).exp() * (1 + 2 * z_loss * (top + log))[:, None] - label_smoothing / (
        whole or max(V, 1)
    )
    hit = target[:, None] == torch.arange(V, device=x.device)
    dz = dz - (1 - label_smoothing) * hit.to(dz.dtype)
    if softcap:
        dz = dz * (1 - (z / softcap) ** 2)
    dz = torch.where((target == ignore_index)[:, None], 0.0, dz * dlosses[:, None])
    right = (target >= (ELSEWHERE if whole else 0)) & (target < V) | (target == ignore_index)
    return (torch.where(right[:, None], dz, torch.nan).to(input.dtype),)


def run(input: Tensor, target: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    """Returns losses (rows,) and sums (rows, 2) of logits (rows, V)."""
    if kernels_run_on(input):
        return kernels.cross_entropy.forward(input, target, *numbers)
    losses, sums = fake(input)
    for some in _parts(input):
        losses[some], sums[some] = defined(input[some], target[some], *numbers)
    return losses, sums


def _parts(input: Tensor) -> Iterator[slice]:
    """Slices of rows whose fp32 copies exist at once: together they take less than the logits, or little."""
    T, V = input.shape
    rows = max(min(max(T * V // 8, LEAST_AT_ONCE), AT_ONCE) // max(V, 1), 1)
    return (slice(start, start + rows) for start in range(0, T, rows))


def _run_gradients(dlosses: Tensor, losses: None, sums: Tensor, input: Tensor, target: Tensor, *numbers: Any) -> tuple[Tensor]:
    return (gradient(dlosses, sums, input, target, *numbers),)


def gradient(
    dlosses: Tensor, sums: Tensor, input: Tensor, target: Tensor, *numbers: Any, into: Tensor | None = None, whole: int = 0
) -> Tensor:  # fmt: skip
    """Returns the gradient of logits (rows, V), written to `into` where that is given; it may be the logits."""
    if kernels_run_on(input):
        return kernels.cross_entropy.gradient(dlosses, sums, input, target, *numbers, into=into, whole=whole)
    into = torch.empty_like(input) if into is None else into
    for some in _parts(input):
        (into[some],) = gradients(dlosses[some], None, sums[some], input[some], target[some], *numbers, whole=whole)
    return into


def fake(input: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Empty losses (rows,) and sums (rows, 2)."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    return input.new_empty(input.shape[0], dtype=dtype), input.new_empty(input.shape[0], 2, dtype=dtype)


NUMBERS = "int ignore_index, float label_smoothing, float softcap, float z_loss"
CROSS_ENTROPY = Operation(
    "cross_entropy", f"Tensor input, Tensor target, {NUMBERS}", results=2, run=run, defined=defined,
    run_gradients=_run_gradients, gradients=gradients, fake=fake,
    fake_gradients=lambda d, losses, sums, input, *_: (input.new_empty(input.shape),), given_to={0: 0}, unused=frozenset((0,)),
)  # fmt: skip
