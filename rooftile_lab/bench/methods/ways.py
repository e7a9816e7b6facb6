"""The classics with their settings: fewer numbers per text, sets by place, sorted tokens, and keys of few dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.loki import decoding as paged
from rooftile.approximate.routing.definition import normed
from rooftile.cost import approximate as cost
from rooftile.cost.approximate import Cost
from rooftile.exact.masks import CAUSAL, FULL, Mask
from rooftile.exact.spec import CallSettings
from rooftile_lab.bench.methods.way import Sizes, Tensors, Way, words_of


@dataclass(frozen=True, kw_only=True)
class Linear(Way):
    """Linear attention with elu(x) + 1 as the feature."""

    normalise: bool = True

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        q, k, v = x.leaves
        o: Tensor = ap.linear(q, k, v, CAUSAL, backend=backend, normalise=self.normalise)
        return o

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        return cost.linear(**words_of(sizes, phase, itemsize))


@dataclass(frozen=True, kw_only=True)
class Performer(Way):
    """Performer with m positive features."""

    m: int = 256
    # T x S x m numbers
    defined: ClassVar[int] = 512

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        return Tensors((q, k, v), (ap.Features.draw(q.shape[-1], self.m, seed=0, device=q.device),))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        q, k, v = x.leaves
        o: Tensor = ap.performer(q, k, v, CAUSAL, features=x.beside[0], backend=backend)
        return o

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        return cost.performer(**words_of(sizes, phase, itemsize), m=self.m)


@dataclass(frozen=True, kw_only=True)
class Linformer(Way):
    """Linformer with r rows, each the mean of its share of the text; with r of at least N, exact attention."""

    r: int = 256
    mask: ClassVar[Mask] = FULL

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        N, r = k.shape[1], min(self.r, k.shape[1])
        row = torch.arange(N, device=k.device) * r // N
        e = torch.zeros(r, N, device=k.device).scatter_(0, row[None], 1.0)
        return Tensors((q, k, v, (e / e.sum(1, keepdim=True)).to(k.dtype)[None]))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        q, k, v, e = x.leaves
        return ap.linformer(q, k, v, e, backend=backend)

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        return cost.linformer(**words_of(sizes, phase, itemsize), r=min(self.r, sizes.N))


@dataclass(frozen=True, kw_only=True)
class SparseTransformer(Way):
    """The strided or fixed sets of Sparse Transformers, both in each head."""

    pattern: str
    stride: int = 128

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        return ap.sparse_transformer(*x.leaves, backend=backend, pattern=self.pattern, stride=self.stride)

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        return cost.sparse_transformer(**words_of(sizes, phase, itemsize), pattern=self.pattern, stride=self.stride)


@dataclass(frozen=True, kw_only=True)
class Reformer(Way):
    """Reformer: the queries are the keys too, so k is not read."""

    rounds: int = 2
    chunk: int = 128

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        return Tensors((q, v))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        qk, v = x.leaves
        return ap.reformer(qk, v, CAUSAL, backend=backend, rounds=self.rounds, chunk=self.chunk, **x.choices)

    def chosen(self, x: Tensors) -> Tensors:
        buckets = 2 ** max((2 * x.leaves[0].shape[1] // self.chunk).bit_length() - 1, 1)
        return x._replace(choices={"hashes": ap.lsh(x.leaves[0], self.rounds, buckets)})

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        return cost.reformer(**words_of(sizes, phase, itemsize), rounds=self.rounds, chunk=self.chunk)

    def target(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # one bucket holds all tokens, so that each sees all earlier ones
        one = torch.zeros(*q.shape[:3], 1, dtype=torch.int32, device=q.device)
        return ap.reformer(q, v, CAUSAL, hashes=one, chunk=q.shape[1], strict=True)


@dataclass(frozen=True, kw_only=True)
class Routing(Way):
    """Routing attention with centroids that have moved towards these tokens, as in training."""

    clusters: int = 64

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        centroids = torch.randn(q.shape[2], self.clusters, q.shape[3], generator=generator).to(q.device)
        with torch.no_grad():
            for _ in range(2):
                _, members = ap.routing(q, k, v, centroids)
                centroids = ap.update_centroids(centroids, q, k, members, decay=0.5)
        return Tensors((q, k, v), (centroids,))

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        q, k, v = x.leaves
        return ap.routing(q, k, v, x.beside[0], CAUSAL, backend=backend, **x.choices)[0]

    def chosen(self, x: Tensors) -> Tensors:
        with torch.no_grad():
            q, k, v = x.leaves
            _, members = ap.routing(q, k, v, x.beside[0], CAUSAL)
        return x._replace(choices={"members": members})

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        return cost.routing(**words_of(sizes, phase, itemsize), clusters=self.clusters)

    def target(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(normed(q), normed(k), v, CAUSAL)


@dataclass(frozen=True, kw_only=True)
class Loki(Way):
    """Decoding with Loki: a group of heads chooses whole pages, from a cache whose keys are turned."""

    heads: tuple[int, int] = (32, 8)
    dims: float = 0.25
    keep: float = 0.25
    page: int = 16
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        loki = ap.Loki.fit(k[:, : 2**13], dims=self.dims, keep=self.keep)
        # an engine's cache has one layout for keys and values
        turned, loki = loki.turn(k).contiguous(), replace(loki, p=loki.p.to(k.device))
        beside: tuple[Any, ...] = (loki,)
        if k.is_cuda:
            # an engine's cache has the leading dimensions beside the keys, too
            leading = turned[..., : loki.leading].contiguous().view(-1, self.page, k.shape[2], loki.leading)
            beside = loki, as_pages(turned, v, self.page), leading
        return Tensors((q[:, -1:].contiguous(), turned, v), beside)

    def run(self, x: Tensors, backend: str | None = None) -> Tensor:
        if len(x.beside) > 1 and not x.choices:
            loki, cache, leading = x.beside
            q = loki.turn(x.leaves[0])[:, 0]
            return paged.decode(q, cache, leading, keep=self.keep, settings=CallSettings(scale=q.shape[-1] ** -0.5))[:, None]
        return x.beside[0].attend(*x.leaves, backend=backend, page=self.page, turned=True, unit="page", **x.choices)

    def chosen(self, x: Tensors) -> Tensors:
        q, k, _ = x.leaves
        return x._replace(choices={"chosen": x.beside[0].choose(q, k, page=self.page, turned=True, unit="page")})

    def cost(self, sizes: Sizes, phase: str, itemsize: int) -> Cost:
        return cost.loki(**words_of(sizes, phase, itemsize), dims=self.dims, keep=self.keep, page=self.page)

    def exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q[:, -1:], k, v, CAUSAL)

    def exact_for(self, k: Tensor, v: Tensor) -> Callable[..., Tensor]:
        """On a GPU paged decoding, as in an engine; a CPU would copy the pages first, so it reads the keys as they lie."""
        if not k.is_cuda:
            return self.exact
        cache = as_pages(k, v, self.page)
        return lambda q, k, v: rt.attention_paged(q[:, -1:], cache, CAUSAL)


def as_pages(k: Tensor, v: Tensor, page: int) -> Any:
    """A view of k and v as a paged cache; the texts must end with a page."""
    from rooftile.kvcache import PagedKV

    B, N = k.shape[:2]
    table = torch.arange(B * N // page, dtype=torch.int32, device=k.device).view(B, -1)
    lengths = torch.full((B,), N, dtype=torch.int32, device=k.device)
    keys, values = (x.reshape(-1, page, *x.shape[2:]) for x in (k, v))
    return PagedKV(keys, values, table, lengths)
