"""Cross-entropy, also from hidden states and the head's weights without storing all logits.

The loss of a row is lse - z_t for logits z and the target t, with label smoothing e: lse - (1 - e) z_t - e mean(z), and with a
z-loss besides a lse². Its gradient is p (1 + 2 a lse) - (1 - e) [t] - e / V. A softcap makes z = c tanh(x / c).

Nothing is approximated: every entry of the gradient counts, the gradient of the weights is summed in fp32 and rounded once, and
nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.errors import InvalidInput
from rooftile.fused.differentiable import Operation
from rooftile.fused.where import runs_on

Reduction = Literal["mean", "sum", "none"]
# logits that exist at once in `linear_cross_entropy`
AT_ONCE = 1 << 27


def cross_entropy(
    input: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean", label_smoothing: float = 0.0,
    softcap: float | None = None, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits, in fp32.

    Args:
        input: (..., V) logits.
        target: (...) int64, from 0 to V - 1, or ignore_index. On a GPU, where nobody reads them, a target out of range gives NaN.
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
    _check(input, input.shape[-1] if input.ndim else 0, target, ignore_index, reduction, label_smoothing, softcap)
    rows, targets = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    losses, _ = _CROSS_ENTROPY(rows, targets, ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss))
    return _reduced(losses, targets, ignore_index, reduction).reshape(target.shape if reduction == "none" else ())


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, ignore_index: int = -100,
    reduction: Reduction = "mean", label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    shift: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits input linear_weight^T + linear_bias, of which only some rows exist at once.

    Args:
        input: (T, D) hidden states.
        linear_weight: (V, D).
        target: (T,) int64.
        linear_bias: (V,).
        ignore_index, reduction, label_smoothing, softcap, z_loss: as in `cross_entropy`.
        shift: whether each row predicts the target of the next: the last row and the first target are left out.

    Raises:
        InvalidInput: shapes or targets do not go together.

    Example:
        >>> x, w, target = torch.randn(5, 16), torch.randn(100, 16, requires_grad=True), torch.randint(100, (5,))
        >>> linear_cross_entropy(x, w, target).backward()
    """
    if input.ndim != 2 or linear_weight.ndim != 2 or input.shape[1] != linear_weight.shape[1]:
        shapes = f"input is {tuple(input.shape)} and linear_weight {tuple(linear_weight.shape)}"
        raise InvalidInput(f"{shapes}; must be (T, D) and (V, D)")
    if shift:
        input, target = input[:-1], target[1:]
    V = linear_weight.shape[0]
    _check(input, V, target, ignore_index, reduction, label_smoothing, softcap)
    if linear_bias is not None and tuple(linear_bias.shape) != (V,):
        raise InvalidInput(f"linear_bias is {tuple(linear_bias.shape)}; must be ({V},)")
    numbers = (ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss))
    losses, _ = _LINEAR_CROSS_ENTROPY(input, linear_weight, linear_bias, target, *numbers)
    return _reduced(losses, target, ignore_index, reduction)


def _check(
    input: Tensor, V: int, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float, softcap: float | None
) -> None:  # fmt: skip
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


def _reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _defined(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    z = input if input.dtype == torch.float64 else input.float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    V = z.shape[-1]
    lse = torch.logsumexp(z, -1)
    target = target.long()
    inside = (target >= 0) & (target < V)
    picked = z.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]
    losses = lse - (1 - label_smoothing) * picked + z_loss * lse * lse
    if label_smoothing:
        losses = losses - label_smoothing * z.mean(-1)
    losses = torch.where(inside, losses, torch.nan)
    return torch.where(target == ignore_index, 0.0, losses), lse


def _gradients(
    dlosses: Tensor, losses: None, lse: Tensor, input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float,
    softcap: float, z_loss: float,
) -> tuple[Tensor]:  # fmt: skip
    x = input if input.dtype == torch.float64 else input.float()
    z = softcap * torch.tanh(x / softcap) if softcap else x
    V, target = x.shape[-1], target.long()
    if torch.is_grad_enabled():
        # a second derivative needs it as a function of the logits
        lse = torch.logsumexp(z, -1)
    dz = (z - lse[:, None]).exp() * (1 + 2 * z_loss * lse)[:, None] - label_smoothing / V
    inside = (target >= 0) & (target < V)
    hit = torch.where(inside, target, 0)[:, None] == torch.arange(V, device=x.device)
    dz = dz - (1 - label_smoothing) * (hit & inside[:, None]).to(dz.dtype)
    if softcap:
        dz = dz * (1 - (z / softcap) ** 2)
    dz = torch.where((target == ignore_index)[:, None], 0.0, dz * dlosses[:, None])
    return (torch.where((inside | (target == ignore_index))[:, None], dz, torch.nan).to(input.dtype),)


def _run(input: Tensor, target: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    if _kernels_run_on(input):
        from rooftile.fused.kernels import cross_entropy as kernels

        return kernels.forward(input, target, *numbers)
    return _defined(input, target, *numbers)


def _run_gradients(dlosses: Tensor, losses: None, lse: Tensor, input: Tensor, target: Tensor, *numbers: Any) -> tuple[Tensor]:
    if _kernels_run_on(input):
        from rooftile.fused.kernels import cross_entropy as kernels

        return (kernels.gradient(dlosses, lse, input, target, *numbers),)
    return _gradients(dlosses, None, lse, input, target, *numbers)


def _kernels_run_on(x: Tensor) -> bool:
    return runs_on(x) and x.dtype != torch.float64


def _fake(input: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(input.dtype, torch.float32)
    losses, lse = (input.new_empty(input.shape[0], dtype=dtype) for _ in range(2))
    return losses, lse


def _chunks(input: Tensor, weight: Tensor) -> int:
    """Rows whose logits exist at once."""
    return max(min(AT_ONCE // max(weight.shape[0], 1), max(input.shape[0], 1)), 1)


def _from_hidden(input: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    return _defined(functional.linear(input, weight, bias), *others)


def _run_from_hidden(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    rows = _chunks(input, weight)
    with torch.autocast(input.device.type, enabled=False):
        parts = zip(input.split(rows), target.split(rows), strict=True)
        found = [_run(functional.linear(x, weight, bias), t, *numbers) for x, t in parts]
    losses, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return losses, lse


def _gradients_from_hidden(
    dlosses: Tensor, losses: None, lse: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *numbers: Any
) -> tuple[Tensor, ...]:
    """In plain operations, for derivatives of derivatives."""
    (dlogits,) = _gradients(dlosses, None, lse, functional.linear(input, weight, bias), target, *numbers)
    db = dlogits.new_zeros(0) if bias is None else dlogits.sum(0).to(bias.dtype)
    return dlogits @ weight, dlogits.T @ input, db


def _run_gradients_from_hidden(
    dlosses: Tensor, losses: None, lse: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *numbers: Any
) -> tuple[Tensor, ...]:
    """Makes the logits again, some rows at a time; dw and db are summed in fp32."""
    wide = torch.promote_types(input.dtype, torch.float32)
    dx = torch.empty_like(input)
    dw = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    db = torch.zeros(0 if bias is None else bias.shape[0], dtype=wide, device=weight.device)
    rows = _chunks(input, weight)
    with torch.autocast(input.device.type, enabled=False):
        for start in range(0, input.shape[0], rows):
            here = slice(start, start + rows)
            logits = functional.linear(input[here], weight, bias)
            (dz,) = _run_gradients(dlosses[here], None, lse[here], logits, target[here], *numbers)
            torch.mm(dz, weight, out=dx[here])
            _add_product(dw, dz, input[here])
            if bias is not None:
                db += dz.sum(0, dtype=wide)
    return dx, dw.to(weight.dtype), db if bias is None else db.to(bias.dtype)


def _add_product(dw: Tensor, dz: Tensor, x: Tensor) -> None:
    """Adds dz^T x to dw, in its dtype."""
    if dz.is_cuda and dz.dtype != dw.dtype:
        dw += torch.mm(dz.T, x, out_dtype=dw.dtype)
    else:
        dw.addmm_(dz.T.to(dw.dtype), x.to(dw.dtype))


_NUMBERS = "int ignore_index, float label_smoothing, float softcap, float z_loss"
_CROSS_ENTROPY = Operation(
    "cross_entropy", f"Tensor input, Tensor target, {_NUMBERS}", results=2, run=_run, defined=_defined,
    run_gradients=_run_gradients, gradients=_gradients, fake=_fake,
    fake_gradients=lambda d, losses, lse, input, *_: (input.new_empty(input.shape),), given_to={0: 0}, unused=frozenset((0,)),
)  # fmt: skip
_LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy", f"Tensor input, Tensor weight, Tensor? bias, Tensor target, {_NUMBERS}", results=2,
    run=_run_from_hidden, defined=_from_hidden, run_gradients=_run_gradients_from_hidden, gradients=_gradients_from_hidden,
    fake=_fake,
    fake_gradients=lambda d, losses, lse, input, weight, bias, *_: (
        input.new_empty(input.shape), weight.new_empty(weight.shape),
        lse.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    ),
    given_to={0: 0, 1: 1, 2: 2}, unused=frozenset((0,)),
)  # fmt: skip
