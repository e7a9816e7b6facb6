"""The sum of three branches, each times its gate, in one pass over memory, and its gradients in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import below_autograd, define, transformed, wants_grad, watched

Branches = tuple[Tensor, Tensor, Tensor]


def gated_sum(branches: Branches, gates: Tensor) -> Tensor:
    """Sums branches (..., D) times their gates (..., 3), in fp32 at least; the result has their dtype and is contiguous.

    Example:
        >>> x = torch.ones(2, 4)
        >>> gated_sum((x, x, x), torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 1.0]]))[:, 0]
        tensor([1., 2.])
    """
    if transformed():
        return _plain(*branches, gates)
    if torch.compiler.is_compiling() or watched(*branches, gates):
        found: Tensor = _GATED_SUM(*branches, gates)
    elif wants_grad(*branches, gates):
        found = _Sum.apply(*branches, gates)
    else:
        found = _run(*branches, gates)
    return found


def _plain(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    x, y, z = (o.to(wide) * gate.to(wide) for o, gate in zip((a, b, c), gates.split(1, dim=-1), strict=True))
    return (x + y + z).to(a.dtype).contiguous()


def _runs_kernels(a: Tensor) -> bool:
    return runs_kernels(a) and a.dtype != torch.float64


def _run(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    if not _runs_kernels(a):
        return _plain(a, b, c, gates)
    from rooftile.approximate.native_sparse.selected.kernels import gated_sum as kernels

    with device_of(a):
        return kernels.forward(a.contiguous(), b.contiguous(), c.contiguous(), gates.contiguous())


def _run_backward(do: Tensor, a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _runs_kernels(a):
        from rooftile.approximate.native_sparse.selected.kernels import gated_sum as kernels

        with device_of(a):
            return kernels.backward(do.contiguous(), a.contiguous(), b.contiguous(), c.contiguous(), gates.contiguous())
    wide = torch.promote_types(a.dtype, torch.float32)
    own = do.to(wide)
    x, y, z = ((own * gate.to(wide)).to(a.dtype).contiguous() for gate in gates.split(1, dim=-1))
    of_gates = torch.stack([(own * o.to(wide)).sum(-1) for o in (a, b, c)], dim=-1)
    return x, y, z, of_gates.to(gates.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        run = _GATED_SUM if watched(*tensors) else _run
        with below_autograd():
            found: Tensor = run(*tensors)
        return found

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        saved = ctx.saved_tensors
        run = _GATED_SUM_BACKWARD if torch.is_grad_enabled() or watched(do, *saved) else _run_backward
        return run(do, *saved)


def _autograd(*tensors: Tensor) -> Tensor:
    if wants_grad(*tensors):
        found: Tensor = _Sum.apply(*tensors)
        return found
    with below_autograd():
        plain: Tensor = _GATED_SUM(*tensors)
        return plain


_GATED_SUM = define(
    "gated_sum(Tensor a, Tensor b, Tensor c, Tensor gates) -> Tensor",
    _run, lambda a, b, c, gates: a.new_empty(a.shape), _autograd,
)  # fmt: skip
_GATED_SUM_BACKWARD = define(
    "gated_sum_backward(Tensor do, Tensor a, Tensor b, Tensor c, Tensor gates) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward, lambda do, a, b, c, gates: tuple(x.new_empty(x.shape) for x in (a, b, c, gates)),
)  # fmt: skip
