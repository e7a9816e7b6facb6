"""Fused operations beside Liger, quack, torch.compile and PyTorch's own: bytes per second, of counted bytes.

    OPERATION-ROWSxSIZE    in bf16, forward ("fwd", as in training) and the backward alone ("bwd"); the L2 cache is flushed before

Each contestant's results and gradients are compared with the formula in fp32 first. `of_fastest_peer_ratio` is the time of the
fastest other contestant over ours: above 1 is faster. `roofline_percent` is the share of the measured copy rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import fused
from rooftile.cost import memory_roof
from rooftile.cost.io import Traffic
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import Work, clock_for
from rooftile_lab.bench.fused_peers import Call, compiled, many, named, refusal
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import beside_peers, contest, refused
from rooftile_lab.bench.run import Progress

# 128 MiB in bf16, in rows of 1k to 64k, and the rows of a decode step
LARGE = ("65536x1024", "16384x4096", "4096x16384", "1024x65536")
DECODE = "256x4096"
EPS, DIM = 1e-5, 128


class Operation(NamedTuple):
    """A fused operation, the formula that it follows, and what others have for it."""

    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    formula: Call
    ours: Call
    peers: dict[str, Call]
    read: tuple[float, float]  # numbers that are read for each of (rows, size), forward and backward
    written: tuple[float, float]
    rest: Callable[[int, int, torch.device], tuple[Any, ...]] = lambda rows, size, device: ()


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x, w.shape, w, EPS)


def _add_rms(x: Tensor, stream: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + stream
    return _rms(total, w), total


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Liger takes (B, heads, T, D) and angles of whole heads, and writes over q and k."""
    angles = (torch.cat((x, x), -1)[None].to(q.dtype) for x in (cos, sin))
    found = named("liger_kernel.transformers.functional", "liger_rope")(
        q.clone().transpose(1, 2), k.clone().transpose(1, 2), *angles
    )
    return tuple(x.transpose(1, 2) for x in found)  # type: ignore[return-value]


def _heads(rows: int, size: int) -> tuple[tuple[int, ...], ...]:
    heads = max(size // DIM, 2)
    keys = max(heads // 5, 1)
    return (1, rows, heads - keys, DIM), (1, rows, keys, DIM)


def _angles(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(rows, device=device), 1e4 ** -torch.linspace(0, 1, DIM // 2, device=device))
    return angles.cos(), angles.sin()


def _targets(rows: int, size: int, device: torch.device) -> tuple[Tensor]:
    return (torch.randint(size, (rows,), device=device, generator=torch.Generator(device).manual_seed(0)),)


_LIGER = "liger_kernel.transformers.functional"
_row: Callable[[int, int], tuple[tuple[int, ...], ...]] = lambda r, n: ((r, n),)  # noqa: E731
OPERATIONS = {
    "rms-norm": Operation(
        lambda r, n: ((r, n), (n,)), _rms, partial(fused.rms_norm, eps=EPS),
        {
            "liger": lambda x, w: named(_LIGER, "liger_rms_norm")(x, w, EPS, 0.0, "llama", False),
            "quack": lambda x, w: named("quack", "rmsnorm")(x, w, eps=EPS),
        },
        (1, 2), (1, 1),
    ),
    "layer-norm": Operation(
        lambda r, n: ((r, n), (n,), (n,)), lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS),
        lambda x, w, b: fused.layer_norm(x, w, b, EPS),
        {"liger": lambda x, w, b: named(_LIGER, "liger_layer_norm")(x, w, b, EPS)}, (1, 2), (1, 1),
    ),
    "add-rms-norm": Operation(
        lambda r, n: ((r, n), (r, n), (n,)), _add_rms, partial(fused.add_rms_norm, eps=EPS),
        {
            "liger": lambda x, s, w: named(_LIGER, "liger_fused_add_rms_norm")(x, s, w, EPS, 0.0, "llama", False),
            "quack": lambda x, s, w: named("quack", "rmsnorm")(x, w, residual=s, eps=EPS),
        },
        (2, 3), (2, 1),
    ),
    "swiglu": Operation(
        lambda r, n: ((r, n), (r, n)), lambda g, u: functional.silu(g) * u, fused.swiglu,
        {"liger": lambda g, u: named(_LIGER, "liger_swiglu")(g, u)}, (2, 3), (1, 2),
    ),
    "rotary": Operation(
        _heads, _rotary, fused.rotary, {"liger": _liger_rotary}, (1, 1), (1, 1), _angles,
    ),
    "softmax": Operation(
        _row, lambda x: x.softmax(-1), fused.softmax,
        {"liger": named(_LIGER, "liger_softmax"), "quack": named("quack", "softmax")}, (1, 2), (1, 1),
    ),
    "cross-entropy": Operation(
        _row, lambda x, t: functional.cross_entropy(x.float(), t, reduction="none").float(),
        lambda x, t: fused.cross_entropy(x, t, reduction="none"),
        {"quack": lambda x, t: named("quack", "cross_entropy")(x, t, reduction="none")}, (1, 1), (0, 1), _targets,
    ),
}  # fmt: skip
# operations whose results leave in FP8
QUANTISED: dict[str, Callable[..., Any]] = {
    "rms-norm": partial(fused.rms_norm_quantised, eps=EPS), "add-rms-norm": partial(fused.add_rms_norm_quantised, eps=EPS),
    "swiglu": fused.swiglu_quantised,
}  # fmt: skip
TO_FP8 = tuple(f"{name}-to-fp8" for name in QUANTISED)
GPU = tuple(f"{name}-{sizes}" for name in (*OPERATIONS, *TO_FP8) for sizes in (*LARGE, DECODE))
CPU = tuple(f"{name}-64x256" for name in (*OPERATIONS, *TO_FP8))
QUICK = tuple(name for name in GPU if name.endswith(("16384x4096", DECODE)))


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    clock = clock_for(session.device, 12.0)
    for name in names:
        say(name)
        what, _, sizes = name.rpartition("-")
        rows, size = map(int, sizes.split("x"))
        if what in TO_FP8:
            yield from _quantised(session, name, rows, size)
            continue
        operation = OPERATIONS[what]
        leaves = [_random(shape, session) for shape in operation.shapes(rows, size)]
        rest = operation.rest(rows, size, session.device)
        calls: dict[str, Call] = {"rooftile": operation.ours, "torch": operation.formula, **operation.peers}
        if session.device.type == "cuda":
            calls["torch-compile"] = compiled(operation.formula)
        why = {who: refusal(call, operation.formula, leaves, rest) for who, call in calls.items()}
        count = max(x.numel() for x in leaves) if what != "rotary" else sum(x.numel() for x in leaves)
        for n, phase in enumerate(("fwd", "bwd")):
            moved = Traffic(*(int(each[n] * count * leaves[0].element_size()) for each in (operation.read, operation.written)))
            works = {who: _work(call, leaves, rest, phase) for who, call in calls.items() if not why[who]}
            named_: dict[str, Any] = {"suite": "fused", "case": name, "phase": phase}
            found = contest(session, works, clock, roofs=memory_roof(moved, session.ceilings, session.dtype), **named_)
            yield from beside_peers(found).values()
            yield from refused(session, why, before="refused: ", dtype=session.dtype, **named_)


def _random(shape: tuple[int, ...], session: Session) -> Tensor:
    x = torch.randn(shape, device=session.device).to(DTYPES[session.dtype])
    return x.requires_grad_()


def _work(call: Call, leaves: list[Tensor], rest: tuple[Any, ...], phase: str) -> Work:
    if phase == "fwd":
        return lambda: call(*leaves, *rest)
    found = many(call(*leaves, *rest))
    dys = [torch.randn_like(y) for y in found]
    return lambda: torch.autograd.grad(found, leaves, dys, retain_graph=True)


def _quantised(session: Session, name: str, rows: int, size: int) -> Iterator[Row]:
    """An operation whose result is quantised as it is written, beside the operation, and the quantising after it."""
    what = name.rpartition("-")[0]
    operation = OPERATIONS[what.removesuffix("-to-fp8")]
    leaves = [_random(shape, session).detach() for shape in operation.shapes(rows, size)]
    quantised = QUANTISED[what.removesuffix("-to-fp8")]

    def apart() -> Any:
        y, *others = many(operation.formula(*leaves))
        y = y.float()
        scales = y.abs().amax(-1, keepdim=True) / 448
        return (y / scales).to(torch.float8_e4m3fn), scales, *others

    def together() -> Any:
        return quantised(*leaves)

    ours = together()
    # a sum with its norm also returns the sum
    ours = ours[0] if isinstance(ours, tuple) else ours
    codes, scales, *_ = apart()
    error = (ours.codes.float() * ours.scales.view(-1, 1) - codes.float() * scales).norm() / (codes.float() * scales).norm()
    named_: dict[str, Any] = {"suite": "fused", "case": name, "phase": "fwd"}
    if not float(error) <= 0.05:
        reason = f"failed: its error is {float(error):.1%} of what is due"
        yield from refused(session, {"rooftile": reason}, dtype=session.dtype, **named_)
        return
    works: dict[str, Work] = {"rooftile": together, "torch": apart}
    # codes are written, of one byte each, and the rest of the bytes is in 16 or 32 bits
    width, read = leaves[0].element_size(), int(operation.read[0])
    written = int(operation.written[0]) - 1
    moved = Traffic(read * width * rows * size, (written * width + 1) * rows * size + 4 * rows)
    roofs = memory_roof(moved, session.ceilings, session.dtype)
    yield from beside_peers(contest(session, works, clock_for(session.device, 12.0), roofs=roofs, **named_)).values()
