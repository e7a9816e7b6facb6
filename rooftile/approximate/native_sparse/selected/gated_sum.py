"""The sum of three branches, each times its gate, in one pass over memory, and its gradients in another."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.fused.differentiable import Operation
from rooftile.fused.where import kernels_run_on
from rooftile.runtime.launch import device_of

Branches = tuple[Tensor, Tensor, Tensor]


def gated_sum(branches: Branches, gates: Tensor) -> Tensor:
    """Sums branches (..., D) times their gates (..., 3), in fp32 at least; the result has their dtype and is contiguous.

    Example:
        >>> x = torch.ones(2, 4)
        >>> gated_sum((x, x, x), torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 1.0]]))[:, 0]
        tensor([1., 2.])
    """
    (found,) = _GATED_SUM(*branches, gates)
    return found


def _defined(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor]:
    wide = torch.promote_types(a.dtype, torch.float32)
    x, y, z = (o.to(wide) * gate.to(wide) for o, gate in zip((a, b, c), gates.split(1, dim=-1), strict=True))
    return ((x + y + z).to(a.dtype).contiguous(),)


def _run(*tensors: Tensor) -> tuple[Tensor]:
    if not kernels_run_on(tensors[0]):
        return _defined(*tensors)
    from rooftile.approximate.native_sparse.selected.kernels import gated_sum as kernels

    with device_of(tensors[0]):
        return (kernels.forward(*(x.contiguous() for x in tensors)),)


def _gradients(do: Tensor, o: None, a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    wide = torch.promote_types(a.dtype, torch.float32)
    own = do.to(wide)
    x, y, z = ((own * gate.to(wide)).to(a.dtype).contiguous() for gate in gates.split(1, dim=-1))
    of_gates = torch.stack([(own * branch.to(wide)).sum(-1) for branch in (a, b, c)], dim=-1)
    return x, y, z, of_gates.to(gates.dtype)


def _run_gradients(do: Tensor, o: None, *tensors: Tensor) -> tuple[Tensor, ...]:
    if not kernels_run_on(do):
        return _gradients(do, None, *tensors)
    from rooftile.approximate.native_sparse.selected.kernels import gated_sum as kernels

    with device_of(do):
        return kernels.backward(*(x.contiguous() for x in (do, *tensors)))


_GATED_SUM = Operation(
    "gated_sum", "Tensor a, Tensor b, Tensor c, Tensor gates", results=1, run=_run, defined=_defined,
    run_gradients=_run_gradients, gradients=_gradients, fake=lambda a, *_: (a.new_empty(a.shape),),
    fake_gradients=lambda do, o, *tensors: tuple(x.new_empty(x.shape) for x in tensors),
    given_to={0: 0, 1: 1, 2: 2, 3: 3}, unused=frozenset((0,)),
)  # fmt: skip
