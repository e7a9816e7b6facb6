"""A method with the settings with which it is measured: its tensors, its call, its cost, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import rooftile as rt
from rooftile.cost import Roof, roof
from rooftile.cost.approximate import Cost
from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL, Mask
from rooftile.hardware.ceilings import Ceilings
from rooftile_lab.bench.works import floor_of


class Sizes(NamedTuple):
    """The sizes of a problem: B texts of N tokens."""

    B: int
    N: int
    H: int
    Hk: int
    D: int


class Tensors(NamedTuple):
    """The inputs of a method."""

    leaves: tuple[Tensor, ...]  # those with gradients
    beside: tuple[Any, ...] = ()  # drawn once: a projection, features, centroids
    choices: Mapping[str, Any] = MappingProxyType({})  # ready-made; without them the call chooses


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method with its settings. A subclass per method says how it is called.

    Attributes:
        name: of its cases.
        heads: of queries, and of keys and values, on a GPU.
    """

    name: str
    heads: tuple[int, int] = (16, 16)

    # exact attention runs with this mask where it takes the place of the method
    mask: ClassVar[Mask] = CAUSAL
    phases: ClassVar[tuple[str, ...]] = ("fwd", "bwd")
    # tokens that its definition can hold on a GPU
    defined: ClassVar[int] = 2048
    # the backend for studies of what is lost, where nothing is timed, on a CPU
    studied: ClassVar[str | None] = None

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        """The inputs for these q (B, N, H, D), k and v (B, N, Hk, D)."""
        return Tensors((q, k, v))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        """One call, as a user makes it; "eager" is the definition."""
        raise NotImplementedError

    def chosen(self, x: Tensors) -> Tensors:
        """The inputs with what the method chooses from them, ready-made. Most methods choose nothing."""
        return x

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        """FLOPs and bytes, from `rooftile.cost`."""
        raise NotImplementedError

    def exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exact attention in this method's place: what a user would call instead."""
        return rt.attention(q, k, v, self.mask)

    def exact_for(self, k: Tensor, v: Tensor) -> Callable[..., Tensor]:
        """`exact` as it is timed: what a cache holds is laid out beforehand."""
        return self.exact

    def target(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The result of a method that leaves nothing out: exact attention, on the queries and keys as the method changes them."""
        return self.exact(q, k, v)


def words_of(sizes: Sizes, phase: str, itemsize: int) -> dict[str, Any]:
    """The arguments that all functions of `rooftile.cost.approximate` share; a step of decoding is a forward."""
    B, N, H, Hk, D = sizes
    named = {"B": B, "T": 1 if phase == "decode" else N, "S": N, "H": H, "Hk": Hk, "D": D, "Dv": D}
    return named | {"itemsize": itemsize, "phase": "bwd" if phase == "bwd" else "fwd"}


def drawn(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, *, queries: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian q, k and v; `queries` is the number of last tokens that ask, all if None."""
    generator = torch.Generator(device).manual_seed(seed)
    B, N, H, Hk, D = sizes
    shapes = ((B, N if queries is None else queries, H, D), (B, N, Hk, D), (B, N, Hk, D))
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return q, k, v


def drawn_for(phase: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The q, k and v of a phase: a step of decoding has one query per text."""
    return drawn(sizes, device, dtype, queries=1 if phase == "decode" else None)


def double(x: Any) -> Any:
    """Tensors of floating point in fp64; others, and what is no tensor, as they are."""
    if isinstance(x, Tensors):
        return Tensors(double(x.leaves), double(x.beside), x.choices)
    if isinstance(x, tuple):
        return tuple(double(each) for each in x)
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def roof_of(cost: Cost, machine: Ceilings, dtype: str) -> Roof:
    """The least time of a cost on a machine."""
    return floor_of(cost.flops, cost.bytes_moved, machine, dtype)


def exact_roof(way: Way, sizes: Sizes, phase: str, machine: Ceilings, dtype: str) -> Roof:
    """The least time of exact attention in a method's place."""
    B, N, H, Hk, D = sizes
    case = Case(
        name="exact", tags=frozenset(), B=B, T=1 if phase == "decode" else N, S=N, H=H, Hk=Hk, dim=D, dtype=dtype, mask=way.mask
    )  # fmt: skip
    return roof(case.problem(needs_grad=phase == "bwd"), machine, "bwd" if phase == "bwd" else "fwd")
