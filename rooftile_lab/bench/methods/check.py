"""The errors of a method's fast path, or of a peer, against its definition in fp64 at a small length, under equal choices.

A result passes where |x - exact| / |exact| is at most twice the definition's in the tensors' own dtype, plus 8 units in
the last place; each gradient too. Nothing is timed that does not pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile_lab.bench.methods.table import sizes_of
from rooftile_lab.bench.methods.way import Tensors, Way, double, drawn

# the most tokens on a CPU
ON_CPU = 256
Run = Callable[[Tensors], Tensor]


class Check:
    """The definition's answer for one way, computed once and compared with every contestant's."""

    def __init__(self, way: Way, device: torch.device, dtype: torch.dtype, N: int | None = None) -> None:
        if N is None:
            N = min(way.defined, ON_CPU) if device.type == "cpu" else way.defined
        sizes = sizes_of(way, device.type, N, small=True)
        self._way, self._eps = way, torch.finfo(dtype).eps
        self._x = way.chosen(way.tensors(*drawn(sizes, device, dtype)))
        self._exact = self._answer(self._as_defined, double(self._x))
        self._plain = self._answer(self._as_defined, self._x)

    def errors(self, run: Run) -> dict[str, float]:
        """The error by phase: of o in "fwd" and "decode", the worst of the gradients in "bwd"."""
        return self._errors(self._answer(run, self._x))

    def complaint(self, found: dict[str, float]) -> str | None:
        """A sentence about errors that are too large, or None."""
        usual = self._errors(self._plain)
        for phase, error in found.items():
            most = 2 * usual[phase] + 8 * self._eps
            # written so that NaN fails
            if not error <= most:
                return f"wrong: relative error {error:.2g} in {phase}; the definition in this dtype has {usual[phase]:.2g}"
        return None

    def _as_defined(self, x: Tensors) -> Tensor:
        return self._way.run(x, "eager")

    def _answer(self, run: Run, x: Tensors) -> list[list[Tensor]]:
        """The output, and the gradients of the leaves; a list per phase."""
        if "bwd" not in self._way.phases:
            with torch.no_grad():
                return [[run(x)]]
        leaves = tuple(leaf.detach().requires_grad_() for leaf in x.leaves)
        o = run(x._replace(leaves=leaves))
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(o.shape, generator=generator).to(self._x.leaves[0].dtype).to(o.device, o.dtype)
        return [[o.detach()], list(torch.autograd.grad(o, leaves, do))]

    def _errors(self, answer: list[list[Tensor]]) -> dict[str, float]:
        pairs = zip(self._way.phases, answer, self._exact, strict=True)
        return {phase: max(map(relative, found, due)) for phase, found, due in pairs}


def relative(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact|, Frobenius; for indices the share that differs."""
    if not x.is_floating_point():
        return (x != exact).double().mean().item()
    exact = exact.double()
    return ((x.double() - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()
