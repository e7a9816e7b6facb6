"""Experts beside a pipeline of PyTorch's grouped product, and beside the bytes of the weights that are touched.

    layer-TOKENS, zipf-TOKENS    64 experts of 1,408, 6 active, and 2 shared, width 2,048 (DeepSeekMoE 16B); uniform load, or the
                                 n-th expert chosen 1 / n as often as the first
    fine-TOKENS                  128 experts of 768, 8 active, width 2,048 (Qwen 3 30B)
    small-TOKENS                 for a CPU

The pipeline sorts, gathers, multiplies by `torch._grouped_mm`, activates, multiplies, scatters and adds. A contestant is timed
only after its outputs were compared with plain operations in fp32. The roof counts each token and each touched weight once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import moe
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile_lab.bench.fused_peers import refusal
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import beside_peers, contest, refused
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, graph_clock, tidy

GPU = ("layer-4096", "zipf-4096", "fine-32768", "fine-1", "fine-8", "fine-64", "fine-256")
CPU = ("small-20",)
QUICK = ("layer-4096", "fine-8")
# up to so few tokens a captured graph is timed: the host would take longer than the kernels
DECODED = 256


class Sizes(NamedTuple):
    """Experts, active ones, width, width of an expert, and shared experts."""

    E: int
    K: int
    d: int
    h: int
    shared: int = 0


KINDS = {
    "layer": Sizes(64, 6, 2048, 1408, 2), "zipf": Sizes(64, 6, 2048, 1408, 2), "fine": Sizes(128, 8, 2048, 768),
    "small": Sizes(4, 2, 32, 16, 1),
}  # fmt: skip


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    dtype = DTYPES[session.dtype]
    for name in names:
        say(name)
        torch.manual_seed(0)
        kind, _, count = name.rpartition("-")
        sizes, tokens = KINDS[kind], int(count)
        routing, leaves = _inputs(sizes, tokens, kind == "zipf", session.device, dtype)
        calls = {"rooftile": partial(_ours, routing, None), "grouped-mm": partial(_pipeline, routing)}
        plain = partial(_ours, routing, "tiled")
        why = {who: refusal(call, plain, leaves, gradients=False) for who, call in calls.items()}
        calls = {who: call for who, call in calls.items() if not why[who]}
        few = tokens <= DECODED
        clock = graph_clock(session.device) if few else clock_for(session.device, 60.0)
        touched = routing.experts.unique().numel() * 3 * sizes.h * sizes.d * leaves[0].itemsize
        moved = touched + 2 * leaves[0].nbytes + sum(x.nbytes for x in leaves[3:])
        flops = 6 * tokens * (sizes.K + sizes.shared) * sizes.h * sizes.d
        words: dict[str, Any] = {"suite": "experts", "case": name}
        works = {who: partial(_forward, call, leaves) for who, call in calls.items()}
        roof = floor_of(flops, moved, session.ceilings, session.dtype)
        yield from beside_peers(contest(session, works, clock, roofs=roof, phase="fwd", **words)).values()
        if not few or session.device.type == "cpu":
            given, dy = [x.requires_grad_() for x in leaves], torch.randn_like(leaves[0])
            steps = {who: partial(_both, call, given, dy) for who, call in calls.items()}
            roof = floor_of(3 * flops, 3 * moved, session.ceilings, session.dtype)
            yield from beside_peers(contest(session, steps, clock, roofs=roof, phase="fwd+bwd", **words)).values()
        yield from refused(session, why, before="refused: ", dtype=session.dtype, phase="fwd", **words)
        del leaves, calls, works
        tidy(session.device)


def _inputs(
    sizes: Sizes, tokens: int, zipf: bool, device: torch.device, dtype: torch.dtype
) -> tuple[moe.Routing, list[Tensor]]:  # fmt: skip
    """The routing; and tokens, up and down, and the shared up and down where there are some."""
    E, K, d, h, shared = sizes
    shapes = [(E, 2 * h, d), (E, d, h), *([(2 * shared * h, d), (d, shared * h)] if shared else [])]
    weights = [(torch.randn(shape, device=device) * shape[-1] ** -0.5).to(dtype) for shape in shapes]
    often = torch.arange(1, E + 1, device=device) ** -1.0 if zipf else torch.ones(E, device=device)
    chosen = torch.multinomial(often.expand(tokens, -1), K).int()
    gates = torch.rand(tokens, K, device=device)
    u = torch.randn(tokens, d, device=device).to(dtype)
    return moe.Routing(chosen, gates / gates.sum(-1, keepdim=True)), [u, *weights]


def _ours(routing: moe.Routing, backend: str | None, u: Tensor, up: Tensor, down: Tensor, *shared: Tensor) -> Tensor:
    shared_up, shared_down = shared or (None, None)
    return moe.experts(u, routing, up, down, shared_up=shared_up, shared_down=shared_down, backend=backend)


def _pipeline(routing: moe.Routing, u: Tensor, up: Tensor, down: Tensor, *shared: Tensor) -> Tensor:
    """Computes experts as one writes them with torch._grouped_mm."""
    K = routing.experts.shape[1]
    ids, order = routing.experts.flatten().sort(stable=True)
    every = torch.arange(len(up), device=u.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids, every, right=True, out_int32=True)
    z = torch._grouped_mm(_swiglu(torch._grouped_mm(u[order // K], up.mT, offs=ends)), down.mT, offs=ends)
    z = torch.zeros_like(z).index_copy(0, order, z).unflatten(0, (-1, K))
    y = (z * routing.gates[..., None]).sum(1).to(u.dtype)
    if not shared:
        return y
    shared_up, shared_down = shared
    return y + functional.linear(_swiglu(functional.linear(u, shared_up)), shared_down)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


@torch.no_grad()
def _forward(call: Callable[..., Tensor], leaves: list[Tensor]) -> Tensor:
    return call(*leaves)


def _both(call: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(*leaves), leaves, dy)
