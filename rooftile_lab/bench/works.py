"""Makes works for a clock: a phase of a call, FlexAttention compiled, the clock of products, and the least time of a work."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cost import Roof
from rooftile.hardware.ceilings import Ceilings
from rooftile.hardware.clock import ReplayClock, Sampler, clock_for


def step(forward: Callable[..., Tensor], leaves: tuple[Tensor, ...], phase: str, do: Tensor | None = None) -> Callable[[], Any]:
    """A work for a clock: a forward without gradients, or the backward alone on a graph that is kept.

    Args:
        forward: a function of the leaves.
        leaves: the tensors that get gradients.
        phase: "bwd", or any other for a forward.
        do: the gradient of the output; random if None.
    """
    if phase != "bwd":

        def alone() -> Tensor:
            with torch.no_grad():
                return forward(*leaves)

        return alone
    wanted = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    o = forward(*wanted)
    grad = torch.randn_like(o) if do is None else do.to(o.dtype)
    return lambda: torch.autograd.grad(o, wanted, grad, retain_graph=True)


def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention of (B, H, T, D) tensors, compiled for static shapes."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    keep_graphs()
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def forward(*tensors: Tensor, **words: Any) -> Tensor:
        # one compilation per shape: a table of shapes exceeds Dynamo's usual limit of 8
        with config.patch({"recompile_limit": 1000}):
            o: Tensor = compiled(*tensors, **words)
        return o

    return forward


def keep_graphs() -> None:
    """Lets a compiled backward be timed alone, again and again on one graph, which donated buffers forbid."""
    from torch._functorch import config

    config.donated_buffer = False


def floor_of(flops: int, moved: int, machine: Ceilings, dtype: str, *, faster: int = 1) -> Roof:
    """The least time of FLOPs and bytes on a machine; `faster` is how many times as fast as in `dtype` it counts."""
    rates = machine.rates(dtype)
    return Roof(
        flops=flops, bytes_moved=moved, compute_us=flops / rates.flops_per_s * 1e6 / faster,
        memory_us=moved / rates.bytes_per_s * 1e6,
    )  # fmt: skip


def graph_clock(device: torch.device) -> Sampler:
    """The clock of products: replays of CUDA graphs, in which nothing waits for a check; the host's clock on a CPU."""
    return ReplayClock() if device.type == "cuda" else clock_for(device, 12.0)


def tidy(device: torch.device) -> None:
    """Frees the memory of what was deleted: the next case asks for tensors of other sizes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def words_of_error(error: Exception, most: int = 200) -> str:
    """The kind of an error and its words in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"
