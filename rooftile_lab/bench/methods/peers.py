"""Other libraries' programs for the same methods, where they are installed, and why others are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftile_lab.bench.methods.check import Run
from rooftile_lab.bench.methods.native_sparse import Selected
from rooftile_lab.bench.methods.way import Tensors, Way
from rooftile_lab.bench.methods.ways import Linear, SparseTransformer
from rooftile_lab.bench.works import compiled_flex

# peers that compute something else, so that no check could pass
OTHERS = {
    "reformer": ("reformer-pytorch", "not timed: a round's first chunk sees the last one of another round, another result"),
    "routing": ("routing-transformer", "not timed: it orders tokens by their rank in a cluster, another result"),
    "nsa": ("fla", "not timed: its NSA has blocks without overlap and keys that branches share, another result"),
    "loki": ("loki", "not timed: there is no package with kernels for it"),
}


@dataclass(frozen=True)
class Peer:
    """A program of another library for some ways.

    Attributes:
        name: of its rows.
        ways: names of the ways that it computes.
        reason: why it cannot run on a device; None if it can.
        make: its forward for a way, a function of that way's tensors.
    """

    name: str
    ways: tuple[str, ...]
    reason: Callable[[torch.device], str | None]
    make: Callable[[Way], Run]


def peers_of(way: Way) -> Iterator[Peer]:
    """The peers of a way."""
    return (peer for peer in PEERS if way.name in peer.ways)


def _runs(device: torch.device) -> str | None:
    return None


def _needs_fla(device: torch.device) -> str | None:
    if find_spec("fla") is None:
        return "not installed; pip install flash-linear-attention"
    return _needs_cuda(device)


def _needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"tensors are on {device.type}; is compiled for CUDA here"


def _product_and_sdpa(way: Way) -> Run:
    """Linformer as two matrix products and PyTorch's attention."""

    def run(x: Tensors) -> Tensor:
        q, k, v, e = x.leaves
        keys, values = (torch.matmul(e, each.transpose(1, 2)) for each in (k, v))  # (B, Hk, r, D)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=q.shape[2] != k.shape[2])
        return o.transpose(1, 2)

    return run


def _fla_linear(way: Way) -> Run:
    """Features of elu in PyTorch, then the recurrence of flash-linear-attention."""
    assert isinstance(way, Linear)
    recur = import_module("fla.ops.linear_attn").chunk_linear_attn

    def run(x: Tensors) -> Tensor:
        q, k, v = x.leaves
        o: Tensor = recur(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=way.normalise)[0]
        return o

    return run


def _features_and_fla(way: Way) -> Run:
    """Performer's features as tensors, then the recurrence of flash-linear-attention."""
    recur = import_module("fla.ops.linear_attn").chunk_linear_attn

    def run(x: Tensors) -> Tensor:
        q, k, v = x.leaves
        (features,) = x.beside
        o: Tensor = recur(features(q), features(k), v, scale=1.0, normalize=True)[0]
        return o

    return run


def fla_selection(q: Tensor, k: Tensor, v: Tensor, *, chosen: Tensor, block: int) -> Tensor:
    """Attention to chosen blocks by flash-linear-attention, without its other branches."""
    attend = import_module("fla.ops.nsa").parallel_nsa
    gates = torch.ones(q.shape[:3], device=q.device, dtype=q.dtype)
    o: Tensor = attend(
        q, k, v, g_slc=gates, block_indices=chosen.long(), block_counts=chosen.shape[-1], block_size=block, window_size=0,
        scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    return o


def _fla_selected(way: Way) -> Run:
    """The selection of flash-linear-attention on our choices."""
    assert isinstance(way, Selected)
    return lambda x: fla_selection(*x.leaves, chosen=x.beside[0], block=way.block)


def _flex(way: Way) -> Run:
    """FlexAttention, compiled, with the same set; its block mask is made once per length."""
    from torch.nn.attention.flex_attention import create_block_mask

    assert isinstance(way, SparseTransformer)
    flex = compiled_flex()
    stride, summary = way.stride, 8
    masks: dict[int, Any] = {}

    def strided(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i - j < stride) | ((i - j) % stride == 0))

    def fixed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i // stride == j // stride) | (j % stride >= stride - summary))

    def run(x: Tensors) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in x.leaves)
        N = q.shape[2]
        if N not in masks:
            sees = strided if way.pattern == "strided" else fixed
            masks[N] = create_block_mask(sees, None, None, N, N, device=q.device, _compile=True)
        return flex(q, k, v, block_mask=masks[N]).transpose(1, 2)

    return run


PEERS = (
    Peer("product and sdpa", ("linformer",), _runs, _product_and_sdpa),
    Peer("fla", ("linear", "linear-sums"), _needs_fla, _fla_linear),
    Peer("features and fla", ("performer",), _needs_fla, _features_and_fla),
    Peer("fla", ("nsa-selected",), _needs_fla, _fla_selected),
    Peer("flex", ("strided", "fixed"), _needs_cuda, _flex),
)
