"""How to call each method of METHODS on random q, k and v, for the tests that all methods share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap

# heads of q, heads of k and v, head dim
H, HK, D = 4, 2, 8
MASKS = {"CAUSAL": rt.CAUSAL, "FULL": rt.FULL, "strict": rt.CAUSAL}


@dataclass(frozen=True)
class Call:
    """A method as a function of q (B, T, H, D), k and v (B, T, Hk, D) and one of its modes.

    Attributes:
        run: returns o (B, T, H, D).
        reads: the inputs on which a row depends at other places than its own, if nothing hides them.
    """

    run: Callable[[Tensor, Tensor, Tensor, str], Tensor]
    reads: str = "kv"


def inputs(T: int, B: int = 2) -> dict[str, Tensor]:
    return {name: torch.randn(B, T, heads, D) for name, heads in (("q", H), ("k", HK), ("v", HK))}


def _linformer(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
    e = torch.randn(1, 8, 200, generator=torch.Generator().manual_seed(2))
    return ap.linformer(q, k, v, e, mask=MASKS[mode])


def _performer(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
    return ap.performer(q, k, v, MASKS[mode], features=ap.Features.draw(D, 16))


def _reformer(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
    return ap.reformer(q, v, MASKS[mode], buckets=8, chunk=8, rounds=2, strict=mode == "strict")


# made outside of what is compiled: older Dynamos do not trace a generator
CENTROIDS = torch.randn(H, 6, D, generator=torch.Generator().manual_seed(2))


def _routing(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
    return ap.routing(q, k, v, CENTROIDS, MASKS[mode], strict=mode == "strict")[0]


def _sparse_transformer(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
    return ap.sparse_transformer(q, k, v, pattern=mode, stride=12, summary=3)


def _loki(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
    """One step per row: each sees the cache as it was then."""
    loki = ap.Loki(torch.eye(D).expand(HK, D, D), dims=0.5, keep=0.3)
    steps = range(q.shape[1])
    return torch.cat([loki.attend(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], unit=mode, page=4) for t in steps], 1)


def _native_sparse(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
    sizes = {"length": 8, "stride": 4}
    gates = torch.linspace(0.2, 0.9, 3).expand(*q.shape[:3], 3)
    pair = ap.compress(k, **sizes), ap.compress(v, **sizes)
    return ap.native_sparse(q, pair, (k, v), (k, v), gates, block_size=8, count=4, window=9, **sizes)


CALLS: dict[str, Call] = {
    "linear": Call(lambda q, k, v, mode: ap.linear(q, k, v, MASKS[mode])),
    "performer": Call(_performer),
    "linformer": Call(_linformer),
    "sparse_transformer": Call(_sparse_transformer),
    # queries are the keys, and k is not used
    "reformer": Call(_reformer, "qv"),
    # queries compete for their places in a cluster
    "routing": Call(_routing, "qkv"),
    "Loki": Call(_loki),
    "native_sparse": Call(_native_sparse),
}
