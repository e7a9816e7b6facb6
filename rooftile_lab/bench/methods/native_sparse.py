"""Native Sparse Attention as it is measured: the whole, and its branches one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.native_sparse import definition
from rooftile.approximate.native_sparse.attention import compressed_attention
from rooftile.cost import approximate as cost
from rooftile.cost.approximate import Cost
from rooftile.exact.masks import CAUSAL, Window
from rooftile.exact.reference import pairs
from rooftile_lab.bench.methods.way import Sizes, Tensors, Way, words_of


@dataclass(frozen=True, kw_only=True)
class _NativeSparse(Way):
    """The settings that the whole and its branches share."""

    heads: tuple[int, int] = (64, 4)
    length: int = 32
    stride: int = 16
    block: int = 64
    count: int = 16
    window: int = 512

    @property
    def spacing(self) -> dict[str, Any]:
        """The settings of compression."""
        return {"length": self.length, "stride": self.stride}

    @property
    def selection(self) -> dict[str, Any]:
        """The settings of the choice."""
        return self.spacing | {"block_size": self.block, "count": self.count}


@dataclass(frozen=True, kw_only=True)
class NativeSparse(_NativeSparse):
    """The three branches with keys and values of their own, and mean compression. Gates of a third each."""

    # gathering the chosen keys takes longer there than the definition does at some thousand tokens
    studied: ClassVar[str | None] = "eager"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        gates = torch.full((*q.shape[:3], 3), 1 / 3, device=q.device, dtype=q.dtype)
        return Tensors((q, k, v, k.clone(), v.clone(), k.clone(), v.clone(), gates))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        q, kc, vc, *rest, gates = x.leaves
        compressed = ap.compress(kc, **self.spacing), ap.compress(vc, **self.spacing)
        return ap.native_sparse(
            q, compressed, (rest[0], rest[1]), (rest[2], rest[3]), gates, backend=backend, window=self.window,
            **self.selection, **x.choices,
        )  # fmt: skip

    def chosen(self, x: Tensors) -> Tensors:
        keys = ap.compress(x.leaves[1], **self.spacing)
        return x._replace(choices={"chosen": ap.choose_blocks(x.leaves[0], keys, tokens=x.leaves[1].shape[1], **self.selection)})

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        found = cost.native_sparse(**words_of(sizes, phase, itemsize), window=self.window, **self.selection)
        # compression reads the keys and values of its branch once, and the backward writes their gradients
        return found._replace(bytes_moved=found.bytes_moved + 2 * sizes.B * sizes.N * sizes.Hk * sizes.D * itemsize)


@dataclass(frozen=True, kw_only=True)
class _Branch(_NativeSparse):
    """A branch by itself. Its keys are compressed, and its blocks chosen, before it is timed."""

    branch: ClassVar[str]

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        words = words_of(sizes, phase, itemsize)
        return cost.native_sparse_branch(**words, branch=self.branch, window=self.window, **self.selection)


@dataclass(frozen=True, kw_only=True)
class Choice(_Branch):
    """The choice of blocks; its result is a tensor of indices."""

    branch = "choice"
    phases: ClassVar[tuple[str, ...]] = ("fwd",)

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        return Tensors((q, ap.compress(k, **self.spacing)), (k.shape[1],))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        found: Tensor = ap.choose_blocks(*x.leaves, tokens=x.beside[0], backend=backend, **self.selection)
        return found


@dataclass(frozen=True, kw_only=True)
class Selected(_Branch):
    """Attention to the chosen blocks."""

    branch = "selected"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        chosen = ap.choose_blocks(q, ap.compress(k, **self.spacing), tokens=k.shape[1], **self.selection)
        return Tensors((q, k, v), (chosen,))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        return ap.selected_attention(*x.leaves, *x.beside, backend=backend, block_size=self.block)


@dataclass(frozen=True, kw_only=True)
class Compressed(_Branch):
    """Attention to the compressed keys."""

    branch = "compressed"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        return Tensors((q, ap.compress(k, **self.spacing), ap.compress(v, **self.spacing)), (k.shape[1],))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        q, k, v = x.leaves
        (S,) = x.beside
        if backend == "eager":
            seen = definition.sees_compressed(q.shape[1], S, k.shape[1], self.length, self.stride, q.device)
            return pairs.attention(q, k, v, seen, scale=q.shape[-1] ** -0.5)[0]
        options = {"backend": backend, "deterministic": None, "scale": q.shape[-1] ** -0.5}
        return compressed_attention(q, k, v, S, self.length, self.stride, options)[0]


@dataclass(frozen=True, kw_only=True)
class Near(_Branch):
    """Exact attention to a window."""

    branch = "near"

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        q, k, v = x.leaves
        return rt.attention(q, k, v, CAUSAL & Window(self.window - 1), backend=backend)
