"""Mamba-2's mixer beside other libraries' kernels for the same, and a whole layer beside a layer of attention, by length.

The mixer without its projections takes [z, x, B, C, dt] as the first projection gives it, through the convolution, the recurrence
and the gated norm, to what the last projection takes. Sizes are of Mamba-2 2.7B: width 2,560, 80 heads of 64, N = 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile import CAUSAL
from rooftile import recurrent as rec
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.fused.gated_norm import rms_norm_gated
from rooftile.hardware.clock import clock_for
from rooftile.nn import Attention, Mamba2
from rooftile_lab.bench.fused_peers import named
from rooftile_lab.bench.methods.crossover import Point, crossing
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, timed_row, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import tidy

HEADS, P, N, TAPS = 80, 64, 128, 4
LENGTHS = tuple(1024 << n for n in range(6))


class Mixer(NamedTuple):
    """A mixer's inputs, ours, plain operations, peers, and the recurrence's x."""

    tensors: list[Tensor]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    peers: dict[str, Callable[..., Any]]
    x: Tensor


def without_projections(batch: int, tokens: int, heads: int | None, device: torch.device, dtype: torch.dtype) -> Mixer:
    """The calls and inputs: the projection (batch, tokens, 2 H P + 2 N + H), and the weights of convolution and norm."""
    H = heads or HEADS
    width = H * P
    parts = width, width + 2 * N, H
    projected = torch.randn(batch, tokens, sum(parts), device=device).to(dtype)
    weights = [torch.randn(*shape, device=device).to(dtype) / 2 for shape in ((parts[1], TAPS), (parts[1],), (width,))]
    A, D, bias = -torch.rand(H, device=device) * 15 - 1, torch.rand(H, device=device), torch.rand(H, device=device) - 5

    def inputs(xBC: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        x, B, C = xBC.split((width, N, N), -1)
        return x.unflatten(-1, (H, P)), dt, A, B.unsqueeze(-2), C.unsqueeze(-2)

    def ours(projected: Tensor, taps: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        z, xBC, dt = projected.split(parts, -1)
        xBC = rec.causal_conv(xBC, taps, shift, return_tail=False)
        y = rec.ssd(*inputs(xBC, dt), D=D, dt_bias=bias, return_state=False)
        return rms_norm_gated(y.flatten(-2), z, weight)

    def plain(projected: Tensor, taps: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        z, xBC, dt = projected.split(parts, -1)
        xBC = rec.causal_conv(xBC, taps, shift, return_tail=False, backend="tiled")
        y = rec.ssd(*inputs(xBC, dt), D=D, dt_bias=bias, return_state=False, backend="tiled")
        return functional.rms_norm(y.flatten(-2) * functional.silu(z), (width,), weight, 1e-5)

    def mamba_ssm(conv: Callable[..., Tensor], projected: Tensor, taps: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        run = named("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
        norm = named("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
        z, xBC, dt = projected.split(parts, -1)
        y = run(*inputs(conv(xBC, taps, shift), dt), chunk_size=256, D=D, dt_bias=bias, dt_softplus=True)
        found: Tensor = norm(y.flatten(-2), weight, None, z=z, eps=1e-5, norm_before_gate=False)
        return found

    # mamba-ssm's own convolution needs nvcc
    peers: dict[str, Callable[..., Any]] = {
        "mamba-ssm": partial(mamba_ssm, torchs_convolution), "mamba-ssm-fla": partial(mamba_ssm, _flas_convolution),
    }  # fmt: skip
    return Mixer([projected, *weights], ours, plain, peers, projected[..., width : 2 * width].unflatten(-1, (H, P)))


def torchs_convolution(x: Tensor, taps: Tensor, shift: Tensor) -> Tensor:
    """PyTorch's grouped convolution and SiLU, x (B, T, W) and taps (W, K)."""
    y = functional.conv1d(functional.pad(x.mT, (taps.shape[1] - 1, 0)), taps[:, None], shift, groups=len(taps))
    return functional.silu(y).mT


def _flas_convolution(x: Tensor, taps: Tensor, shift: Tensor) -> Tensor:
    y: Tensor = named("fla.modules.causal_conv1d", "causal_conv1d")(x, taps, shift, activation="silu")[0]
    return y


def layers(
    session: Session, lengths: Sequence[int], say: Progress, *, suite: str, dim: int = 2560, head_dim: int = 128
) -> Iterator[Row]:  # fmt: skip
    """Rows of a layer of Mamba-2 and one of causal attention, of one width, at each length, and the length where they cross."""
    device, dtype = session.device, DTYPES[session.dtype]
    clock = clock_for(device, 60.0)
    torch.manual_seed(0)
    both: dict[str, nn.Module] = {
        "mamba2": Mamba2(dim, device=device, dtype=dtype),
        "attention": Attention(dim, dim // head_dim, mask=CAUSAL, bias=False, device=device, dtype=dtype),
    }
    points: dict[str, list[Point]] = {"fwd": [], "fwd+bwd": []}
    for tokens in sorted(lengths):
        say(f"layers of {dim}, {tokens:,} tokens")
        x = torch.randn(1, tokens, dim, device=device).to(dtype)
        for phase, measured in points.items():
            work = _forward if phase == "fwd" else _both
            rows = contest(
                session, {who: partial(work, layer, x) for who, layer in both.items()}, clock, suite=suite,
                case=f"layer-{tokens}", phase=phase,
            )  # fmt: skip
            us = times_of(rows)
            measured.append(Point(tokens, us["mamba2"], us["attention"]))
            yield with_measures(rows["mamba2"], of_attention_ratio=us["attention"] / us["mamba2"])
            yield rows["attention"]
        del x
        tidy(device)
    if len(lengths) > 1:
        for phase, measured in points.items():
            at = crossing(measured)
            row = timed_row(session, [], backend="mamba2", suite=suite, case="layer-crossover", phase=phase)
            longest = with_measures(row, longest_tokens=max(lengths))
            yield longest if at is None else with_measures(longest, crossover_tokens=at)


@torch.no_grad()
def _forward(layer: nn.Module, x: Tensor) -> Any:
    return layer(x)


def _both(layer: nn.Module, x: Tensor) -> Any:
    leaves = [x.detach().requires_grad_(), *layer.parameters()]
    y = layer(leaves[0])
    return torch.autograd.grad(y, leaves, torch.ones_like(y))
