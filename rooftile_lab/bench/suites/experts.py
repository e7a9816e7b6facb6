"""Experts beside other libraries' experts, and beside the bytes of the weights that are touched.

    layer-TOKENS, zipf-TOKENS    64 experts of 1,408, 6 active, and 2 shared, width 2,048 (DeepSeekMoE 16B); uniform load, or the
                                 n-th expert chosen 1 / n as often as the first
    fine-TOKENS                  128 experts of 768, 8 active, width 2,048 (Qwen 3 30B)
    small-TOKENS                 for a CPU

`rooftile_lab.bench.expert_peers` lists the peers. A contestant is timed only after its outputs, and for the phase "fwd+bwd" its
gradients, were compared with plain operations in fp32. The roof counts each token and each touched weight once. `kept_mib` is the
memory that a forward leaves allocated for its backward on a GPU, beyond the inputs and the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile import moe
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile_lab.bench.expert_peers import PEERS
from rooftile_lab.bench.fused_peers import refusal
from rooftile_lab.bench.peer_tuning import compiled_side_by_side
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import beside_peers, contest, refused, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, graph_clock, tidy, words_of_error

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
    with compiled_side_by_side() if session.device.type == "cuda" else nullcontext():
        for name in names:
            say(name)
            yield from _measure(session, name)
            tidy(session.device)


def _measure(session: Session, name: str) -> Iterator[Row]:
    torch.manual_seed(0)
    kind, _, count = name.rpartition("-")
    sizes, tokens = KINDS[kind], int(count)
    routing, leaves = _inputs(sizes, tokens, kind == "zipf", session.device, DTYPES[session.dtype])
    calls: dict[str, Callable[..., Tensor]] = {"rooftile": partial(_ours, routing, None)}
    calls |= {who: partial(call, routing) for who, call in PEERS.items()}
    few = tokens <= DECODED
    clock = graph_clock(session.device) if few else clock_for(session.device, 60.0)
    touched = routing.experts.unique().numel() * 3 * sizes.h * sizes.d * leaves[0].itemsize
    moved = touched + 2 * leaves[0].nbytes + sum(x.nbytes for x in leaves[3:])
    flops = 6 * tokens * (sizes.K + sizes.shared) * sizes.h * sizes.d
    phases = ("fwd",) if few and session.device.type != "cpu" else ("fwd", "fwd+bwd")
    for phase in phases:
        backward = phase == "fwd+bwd"
        words: dict[str, Any] = {"suite": "experts", "case": name, "phase": phase}
        plain = partial(_ours, routing, "tiled")
        why = {who: refusal(call, plain, leaves, gradients=backward) for who, call in calls.items()}
        if few and session.device.type == "cuda":
            why = {who: reason or _wait(calls[who], leaves) for who, reason in why.items()}
        yield from refused(session, why, before="refused: ", dtype=session.dtype, **words)
        given, dy = [x.detach().requires_grad_(backward) for x in leaves], torch.randn_like(leaves[0])
        timed = {who: call for who, call in calls.items() if not why[who]}
        step = partial(partial, _both, dy) if backward else partial(partial, _forward)
        works = {who: step(call, given) for who, call in timed.items()}
        times = 3 if backward else 1
        roof = floor_of(times * flops, times * moved, session.ceilings, session.dtype)
        for who, row in beside_peers(contest(session, works, clock, roofs=roof, **words)).items():
            is_kept = backward and session.device.type == "cuda"
            yield with_measures(row, kept_mib=_kept(timed[who], given) / 2**20) if is_kept else row


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


@torch.no_grad()
def _forward(call: Callable[..., Tensor], leaves: list[Tensor]) -> Tensor:
    return call(*leaves)


def _both(dy: Tensor, call: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(*leaves), leaves, dy)


def _kept(call: Callable[..., Tensor], leaves: list[Tensor]) -> int:
    """The bytes that a forward leaves on a GPU for its backward, without its output."""
    before = torch.cuda.memory_allocated(leaves[0].device)
    y = call(*leaves)
    return torch.cuda.memory_allocated(leaves[0].device) - before - y.nbytes


@torch.no_grad()
def _wait(call: Callable[..., Tensor], leaves: list[Tensor]) -> str:
    """Why no CUDA graph holds a call: it waits for the GPU. An empty text if it does not."""
    torch.cuda.set_sync_debug_mode("error")
    # a peer is not ours: whatever stops it is its reason
    try:
        call(*leaves)
    except Exception as error:
        return words_of_error(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""
