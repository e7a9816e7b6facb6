"""Recurrences beside other libraries' kernels, and beside the bytes that they have to move.

    ssd-BxT               Mamba-2's recurrence, 80 heads of 64 with N = 128
    delta-BxT             the gated delta rule, 16 key and 32 value heads of 128
    scan-BxT              Mamba-1's scan, 5,120 channels with N = 16
    conv-BxT              the convolution before Mamba-2 2.7B's recurrence, 5,376 channels
    mixer-BxT             Mamba-2 2.7B's layer without its projections: convolution, recurrence, gated norm
    layer-T               its layer, projections and all, beside causal attention of 20 heads of 128, and where they cross
    ssd-step-S, delta-step-S    one token of each of S sequences, states in fp32
    small-KIND            small sizes, for a CPU

`rooftile` is the automatic choice. Peers are mamba-ssm's and fla's Triton kernels and flash-qla's in TileLang, where they can be
imported; without nvcc TileLang needs `TILELANG_EXECUTION_BACKEND=nvrtc` in the environment. mamba-ssm's parts of a mixer take
PyTorch's convolution, or fla's. A contestant is timed only after its outputs were compared with plain operations in fp32. The
roof counts each input and output once, and the products of the recurrence. A peer whose gradients raise or are wrong has no time
in the phase "fwd+bwd".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import recurrent as rec
from rooftile.cost import states
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile_lab.bench import mixers
from rooftile_lab.bench.fused_peers import named, refusal
from rooftile_lab.bench.peer_tuning import compiled_side_by_side
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import beside_peers, contest, refused
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, tidy

_LENGTHS = ("1x16384", "8x2048")
GPU = (
    *(f"{kind}-{size}" for kind in ("conv", "ssd", "mixer", "scan", "delta") for size in _LENGTHS),
    *("ssd-step-256", "delta-step-256"),
    *(f"layer-{tokens}" for tokens in mixers.LENGTHS),
)
CPU = tuple(f"small-{kind}" for kind in ("conv", "ssd", "mixer", "scan", "delta"))
QUICK = ("conv-8x2048", "ssd-8x2048", "ssd-step-256")
# tokens on which results are compared
CHECKED = 500


class Problem(NamedTuple):
    """A call and its peers: each takes the tensors, and returns its outputs alone; `plain` is what they are compared with."""

    tensors: list[Tensor]
    ours: Callable[..., Any]
    plain: Callable[..., Any] | None
    peers: dict[str, Callable[..., Any]]
    flops: int
    # bytes of a state that is read and written
    state: int = 0
    gradients: bool = True

    def checked(self) -> list[Tensor]:
        """The first tokens of the tensors (B, T, ...); constants as they are."""
        return [x[:1, :CHECKED] if x.ndim > 2 else x for x in self.tensors]


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    with compiled_side_by_side() if session.device.type == "cuda" else nullcontext():
        yield from _measure(session, [name for name in names if not name.startswith("layer-")], say)
        lengths = [int(name.removeprefix("layer-")) for name in names if name.startswith("layer-")]
        yield from mixers.layers(session, lengths, say, suite="recurrent")


def _measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    clock = clock_for(session.device, 60.0)
    dtype = DTYPES[session.dtype]
    for name in names:
        say(name)
        torch.manual_seed(0)
        problem = _problem(name, session.device, dtype)
        calls = {"rooftile": problem.ours, **problem.peers}
        why = {who: _refused(call, problem) for who, call in calls.items()}
        calls = {who: call for who, call in calls.items() if not why[who]}
        y = problem.ours(*problem.tensors)
        moved = sum(x.nbytes for x in (*problem.tensors, y)) + 2 * problem.state
        words: dict[str, Any] = {"suite": "recurrent", "case": name}
        roof = floor_of(problem.flops, moved, session.ceilings, session.dtype)
        works = {who: partial(_forward, call, problem.tensors) for who, call in calls.items()}
        yield from beside_peers(contest(session, works, clock, roofs=roof, phase="fwd", **words)).values()
        if problem.gradients:
            leaves, dy = [x.detach().requires_grad_() for x in problem.tensors], torch.randn_like(y)
            wrong = {who: _refused(call, problem, gradients=True) for who, call in calls.items()}
            works = {who: partial(_both, call, leaves, dy) for who, call in calls.items() if not wrong[who]}
            yield from beside_peers(contest(session, works, clock, phase="fwd+bwd", **words)).values()
            yield from refused(session, wrong, before="refused: ", dtype=session.dtype, phase="fwd+bwd", **words)
        yield from refused(session, why, before="refused: ", dtype=session.dtype, phase="fwd", **words)
        del problem, calls, works, y
        tidy(session.device)


@torch.no_grad()
def _forward(call: Callable[..., Any], tensors: list[Tensor]) -> Any:
    return call(*tensors)


def _both(call: Callable[..., Any], leaves: list[Tensor], dy: Tensor) -> Any:
    return torch.autograd.grad(call(*leaves), leaves, dy)


def _refused(call: Callable[..., Any], problem: Problem, gradients: bool = False) -> str:
    # a step has no plain form beside it, and changes its states: tests compare it
    return "" if problem.plain is None else refusal(call, problem.plain, problem.checked(), gradients=gradients)


def _problem(name: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """The problem of a case."""
    kind, _, size = name.rpartition("-")
    if kind == "small":
        return KINDS[size](1, 128, 2, device, dtype)
    if kind in STEPS:
        return STEPS[kind](int(size), device, dtype)
    batch, tokens = map(int, size.split("x"))
    return KINDS[kind](batch, tokens, None, device, dtype)


def _ssd(batch: int, tokens: int, heads: int | None, device: torch.device, dtype: torch.dtype) -> Problem:
    H, P, N = heads or 80, 64, 128
    x, dt, B, C = (
        torch.randn(batch, tokens, *rest, device=device).to(dtype) for rest in ((H, P), (H,), (1, N), (1, N))
    )  # fmt: skip
    A, D, bias = -torch.rand(H, device=device) * 15 - 1, torch.rand(H, device=device), torch.rand(H, device=device) - 5

    def call(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, backend: str | None = None) -> Tensor:
        return rec.ssd(x, dt, A, B, C, D=D, dt_bias=bias, return_state=False, backend=backend)

    def mamba_ssm(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        run = named("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
        return run(x, dt, A, B, C, chunk_size=256, D=D, dt_bias=bias, dt_softplus=True)

    def fla(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        # steps go into the values, and each head has a query and a key of its own there
        step = functional.softplus(dt.float() + bias)
        k, q = (one.expand(-1, -1, H, -1) for one in (B, C))
        run = named("fla.ops.simple_gla", "chunk_simple_gla")
        y, _ = run(q, k, x * step[..., None].to(x.dtype), g=step * A, scale=1.0)
        return y + D[:, None].to(x.dtype) * x

    flops = states.ssd_flops(x, x.new_empty(0, H, P, N), "fwd")
    return Problem([x, dt, B, C], call, partial(call, backend="tiled"), {"mamba-ssm": mamba_ssm, "fla": fla}, flops)


def _delta(batch: int, tokens: int, heads: int | None, device: torch.device, dtype: torch.dtype) -> Problem:
    Hk, D = heads or 16, 128
    q, k, v = (torch.randn(batch, tokens, H, D, device=device).to(dtype) for H in (Hk, Hk, 2 * Hk))
    g, beta = -0.1 * torch.rand(batch, tokens, 2 * Hk, device=device), torch.rand(batch, tokens, 2 * Hk, device=device).to(dtype)

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, backend: str | None = None) -> Tensor:
        return rec.gated_delta(q, k, v, g, beta, return_state=False, backend=backend)

    def fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return named("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    def flash_qla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return named("flash_qla", "chunk_gated_delta_rule")(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    flops = states.delta_flops(v, v.new_empty(0, 2 * Hk, D, D), "fwd")
    peers = {"fla": fla, "flash-qla": flash_qla}
    return Problem([q, k, v, g, beta], call, partial(call, backend="tiled"), peers, flops)


def _scan(batch: int, tokens: int, heads: int | None, device: torch.device, dtype: torch.dtype) -> Problem:
    W, N = 64 * heads if heads else 5120, 16
    x, dt, z = (torch.randn(batch, tokens, W, device=device).to(dtype) for _ in range(3))
    B, C = (torch.randn(batch, tokens, N, device=device).to(dtype) for _ in range(2))
    A = -torch.arange(1.0, N + 1, device=device).repeat(W, 1)
    D, bias = torch.rand(W, device=device), torch.rand(W, device=device) - 5

    def call(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, backend: str | None = None) -> Tensor:
        return rec.selective_scan(x, dt, A, B, C, D=D, z=z, dt_bias=bias, return_state=False, backend=backend)

    return Problem([x, dt, B, C, z], call, partial(call, backend="tiled"), {}, 0)


def _conv(batch: int, tokens: int, heads: int | None, device: torch.device, dtype: torch.dtype) -> Problem:
    W = 64 * heads if heads else 5376
    x = torch.randn(batch, tokens, W, device=device).to(dtype)
    weight, bias = torch.randn(W, 4, device=device).to(dtype), torch.randn(W, device=device).to(dtype)

    def call(x: Tensor, weight: Tensor, bias: Tensor, backend: str | None = None) -> Tensor:
        return rec.causal_conv(x, weight, bias, return_tail=False, backend=backend)

    return Problem([x, weight, bias], call, partial(call, backend="tiled"), {"torch": mixers.torchs_convolution}, 0)


def _mixer(batch: int, tokens: int, heads: int | None, device: torch.device, dtype: torch.dtype) -> Problem:
    mixer = mixers.without_projections(batch, tokens, heads, device, dtype)
    flops = states.ssd_flops(mixer.x, mixer.x.new_empty(0, *mixer.x.shape[-2:], mixers.N), "fwd")
    return Problem(mixer.tensors, mixer.ours, mixer.plain, mixer.peers, flops)


def _ssd_step(count: int, device: torch.device, dtype: torch.dtype) -> Problem:
    H, P, N = 80, 64, 128
    state = torch.zeros(count, H, P, N, device=device)
    x, dt, B, C = (torch.randn(count, *rest, device=device).to(dtype) for rest in ((H, P), (H,), (1, N), (1, N)))
    A, D, bias = -torch.rand(H, device=device) * 15 - 1, torch.rand(H, device=device), torch.rand(H, device=device) - 5

    def call(*given: Tensor) -> Tensor:
        x, dt, B, C = given
        return rec.ssd_step(state, x, dt, A, B, C, D=D, dt_bias=bias)

    return Problem([x, dt, B, C], call, None, {}, 0, state.nbytes, gradients=False)


def _delta_step(count: int, device: torch.device, dtype: torch.dtype) -> Problem:
    Hk, D = 16, 128
    state = torch.zeros(count, 2 * Hk, D, D, device=device)
    q, k, v = (torch.randn(count, H, D, device=device).to(dtype) for H in (Hk, Hk, 2 * Hk))
    g, beta = -0.1 * torch.rand(count, 2 * Hk, device=device), torch.rand(count, 2 * Hk, device=device).to(dtype)

    def call(*given: Tensor) -> Tensor:
        return rec.gated_delta_step(state, *given)

    return Problem([q, k, v, g, beta], call, None, {}, 0, state.nbytes, gradients=False)


KINDS = {"ssd": _ssd, "delta": _delta, "scan": _scan, "conv": _conv, "mixer": _mixer}
STEPS = {"ssd-step": _ssd_step, "delta-step": _delta_step}
