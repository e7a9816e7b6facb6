"""The fused operations with gradients: calls, plain formulas in fp64, and the rule of two for results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import fused


class Operation(NamedTuple):
    """A call on tensors of some shapes, and the formula that it must follow."""

    call: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]]


def rms(x: Tensor, w: Tensor, eps: float = 1e-3, plus_one: bool = False) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (w + 1 if plus_one else w)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), w) + b


def added(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, stream: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        # the stream is rounded once, and what is normalised is what it was rounded to
        total = stream + x
        return norm(total, *weights), total

    return run


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs as complex numbers times exp(i angle)."""
    half, dtype = angles.shape[-1], x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    first, second = x[..., :half], x[..., half : 2 * half]
    if interleaved:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    y = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    parts = torch.stack((y.real, y.imag), -1).flatten(-2) if interleaved else torch.cat((y.real, y.imag), -1)
    return torch.cat((parts, x[..., 2 * half :]), -1).to(dtype)


def rotary(interleaved: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def angles(q: Tensor) -> Tensor:
        return torch.linspace(0, 3, q.shape[1] * 3, dtype=torch.float64, device=q.device).view(q.shape[1], 3)

    def call(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        return fused.rotary(q, k, angles(q).cos().to(wide), angles(q).sin().to(wide), interleaved)

    return call, lambda q, k: (turned(q, angles(q), interleaved), turned(k, angles(k), interleaved))


def gated(activation: str, function: Callable[[Tensor], Tensor]) -> Operation:
    def formula(x: Tensor) -> Tensor:
        gate, up = x.tensor_split(2, -1)
        return function(gate) * up

    return Operation(lambda x: fused.gated(x, activation), formula, lambda r, n: [(r, 2 * n)])


def parts_of(n: int) -> int:
    """Groups of a row of n numbers."""
    return next(groups for groups in (4, 3, 1) if n % groups == 0)


def gated_first(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    groups = parts_of(x.shape[-1])
    return rms((x * functional.silu(z)).unflatten(-1, (groups, -1)), w.unflatten(-1, (groups, -1))).flatten(-2)


def gated_after(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return rms(x.unflatten(-1, (parts_of(x.shape[-1]), -1)), w).flatten(-2) * functional.silu(z)


def targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]


def rows(rows: int, size: int) -> list[tuple[int, ...]]:
    return [(rows, size)]


OPERATIONS = {
    "rms norm": Operation(lambda x, w: fused.rms_norm(x, w, 1e-3), rms, lambda r, n: [(r, n), (n,)]),
    "rms norm, plus one": Operation(
        lambda x, w: fused.rms_norm(x, w, 1e-3, True), lambda x, w: rms(x, w, plus_one=True), lambda r, n: [(r, n), (n,)]
    ),
    "gated norm": Operation(
        lambda x, z, w: fused.rms_norm_gated(x, z, w, groups=parts_of(x.shape[-1]), eps=1e-3),
        gated_first,
        lambda r, n: [(r, n), (r, n), (n,)],
    ),
    "gated norm, gate after": Operation(
        lambda x, z, w: fused.rms_norm_gated(x, z, w, groups=parts_of(x.shape[-1]), gate_first=False, eps=1e-3),
        gated_after,
        lambda r, n: [(r, n), (r, n), (n // parts_of(n),)],
    ),
    "layer norm": Operation(lambda x, w, b: fused.layer_norm(x, w, b, 1e-3), layer, lambda r, n: [(r, n), (n,), (n,)]),
    "add, rms norm": Operation(
        lambda x, s, w: fused.add_rms_norm(x, s, w, 1e-3), added(rms), lambda r, n: [(r, n), (r, n), (n,)]
    ),
    "add, layer norm": Operation(
        lambda x, s, w, b: fused.add_layer_norm(x, s, w, b, 1e-3), added(layer), lambda r, n: [(r, n), (r, n), (n,), (n,)]
    ),
    "swiglu": Operation(fused.swiglu, lambda g, u: functional.silu(g) * u, lambda r, n: [(r, n)] * 2),
    "geglu": Operation(fused.geglu, lambda g, u: functional.gelu(g, approximate="tanh") * u, lambda r, n: [(r, n)] * 2),
    "geglu, exact": Operation(
        lambda g, u: fused.geglu(g, u, tanh=False), lambda g, u: functional.gelu(g) * u, lambda r, n: [(r, n)] * 2
    ),
    "gated, silu": gated("silu", functional.silu),
    "gated, relu": gated("relu", functional.relu),
    "gated, gelu": gated("gelu_pytorch_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    "rotary": Operation(*rotary(False), lambda r, n: [(2, r, 4, 8), (2, r, 2, 8)]),
    "rotary, interleaved": Operation(*rotary(True), lambda r, n: [(2, r, 4, 8), (2, r, 2, 8)]),
    "softmax": Operation(lambda x: fused.softmax(x, 0.7), lambda x: (0.7 * x).softmax(-1), rows),
    "cross entropy": Operation(
        # its losses are in fp32
        lambda x: fused.cross_entropy(x, targets(x), reduction="none", label_smoothing=0.1).to(x.dtype),
        lambda x: losses(x, targets(x), 0.1, None, 0.0),
        rows,
    ),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(name: str, r: int, n: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    """Leaves, the first of which has strided rows."""
    found = []
    for shape in OPERATIONS[name].shapes(r, n):
        wide = torch.randn(*shape[:-1], shape[-1] + 8, device=device).to(dtype)
        found.append(wide[..., : shape[-1]].requires_grad_())
    return found


# added to every second row, as far as the dtype reaches; -inf is its smallest number
OFFSETS = (0.0, 1e3, 1e6, -1e6, 1e8, -torch.inf)
WITH_OFFSETS = ("softmax", "cross entropy")


def add_offset(x: Tensor, offset: float) -> None:
    """Adds an offset to every second row of a leaf, in place."""
    widest = torch.finfo(x.dtype).max
    with torch.no_grad():
        x[1::2] = (x[1::2].float() + offset).clamp(-widest, widest).to(x.dtype)


def check(name: str, leaves: list[Tensor]) -> None:
    """Asserts the rule of two for results and gradients, beside PyTorch's autograd in the same dtype."""
    operation = OPERATIONS[name]
    exact, plain = [], []
    for dtype, found in ((torch.float64, exact), (leaves[0].dtype, plain)):
        copies = [x.detach().to(dtype).requires_grad_() for x in leaves]
        found += answers(operation.formula, copies)
    for x, due, usual in zip(answers(operation.call, leaves), exact, plain, strict=True):
        assert x.dtype == leaves[0].dtype
        # one number's gradient is what is left of terms near one
        size = due.abs().amax().clamp(min=1.0 if due.numel() == 1 else 0.0) if due.numel() else 0
        unit = 8 * torch.finfo(x.dtype).eps * size + 1e-30
        for reduce in (torch.amax, torch.mean) if due.numel() else ():
            error, allowed = (reduce((y.double() - due).abs()) for y in (x, usual))
            assert error <= 2 * allowed + unit, (name, float(error), float(allowed))


def answers(call: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    """Results and gradients under fixed upstream gradients."""
    found = call(*leaves)
    results = [found] if isinstance(found, Tensor) else list(found)
    generator = torch.Generator().manual_seed(2)
    dys = [torch.randn(y.shape, generator=generator).to(y) for y in results]
    return [y.detach() for y in results] + list(torch.autograd.grad(results, leaves, dys))


def losses(x: Tensor, target: Tensor, smoothing: float, softcap: float | None, z_loss: float, ignore: int = -100) -> Tensor:
    """The formula of cross-entropy, for each row."""
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    # unlike z - logsumexp(z), right where the logits of a row share a large offset
    logs, lse = z.log_softmax(-1), torch.logsumexp(z, -1)
    due = torch.full_like(z, smoothing / z.shape[-1])
    due.scatter_add_(1, target.clamp(min=0)[:, None], torch.full_like(due[:, :1], 1 - smoothing))
    # an lse beyond the dtype would be 0 * inf
    extra = z_loss * lse * lse if z_loss else 0.0
    return torch.where(target == ignore, 0.0, extra - (due * logs).sum(-1))
