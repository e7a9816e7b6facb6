"""Exhibits about passes over memory: more arithmetic in one pass, and fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from rooftile.diagnosis.output.units import count, percent
from rooftile.diagnosis.tour.exhibit import Exhibit, ExhibitCase, Lab, one_after_another

RUNGS = {"cpu": (1, 2, 4, 8, 16, 32, 64), "cuda": (1, 4, 16, 32, 64, 128, 256)}
# bytes of an array, far beyond any cache
LARGE = {"cpu": 1 << 27, "cuda": 1 << 29}
FACTOR, SUMMAND = 0.9375, 0.0625


def repeats(lab: Lab, rungs: Sequence[int] = (), nbytes: int = 0) -> Exhibit:
    """Raises the arithmetic of one pass over an array, as Horace He did; the time is flat, then rises."""
    x, y = _arrays(lab, nbytes)
    n, rungs = x.numel(), tuple(rungs) or RUNGS[lab.device.type]
    # 8 bytes and 2 FLOPs for each number and repeat
    knee = 4 * lab.ceilings.fma_tflops * 1e3 / lab.ceilings.copy_gbs
    cases = [
        ExhibitCase(name=f"{r}", expected=lab.expect(bytes=8 * n, flops=2 * r * n), work=_repeated(r, x, y)) for r in rungs
    ]  # fmt: skip

    def lesson(us: Mapping[str, float]) -> str:
        # well before the knee
        flat = max((r for r in rungs if r <= knee / 2), default=rungs[1])
        grew = us[f"{flat}"] / us[f"{rungs[0]}"]
        at = knee_of([(r, us[f"{r}"]) for r in rungs])
        risen = "the time never rises here" if at is None else f"the time rises from about {at:.0f}"
        words = (
            f"{flat // rungs[0]} times the arithmetic takes {grew:.2f} times as long: before the knee memory bounds the pass, "
            f"and arithmetic is free. The ceilings put the knee at {knee:.0f} repeats; {risen}."
        )
        if us[f"{rungs[-1]}"] > 1.5 * lab.expect(bytes=8 * n, flops=2 * rungs[-1] * n).us:
            words += " Far beyond it each repeat waits for the one before, and is slower than the ceiling: that is latency."
        return words

    return Exhibit(
        title="More arithmetic on the same bytes",
        does=f"y = {FACTOR} y + {SUMMAND}, repeated in one pass over {count(x.nbytes, 'B')} of numbers: read once, written once.",
        cases=tuple(cases),
        lesson=lesson,
    )


def knee_of(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns the repeats at which the flat part of (repeats, time) meets the rising one; None if it does not rise.

    The last two points have the cost of a repeat, and the first is the flat part.
    """
    (first, flat), (before, earlier), (last, latest) = points[0], points[-2], points[-1]
    if latest < 1.5 * flat or latest <= earlier:
        return None
    each = (latest - earlier) / (last - before)
    return max(first, last - (latest - flat) / each)


def cosines(lab: Lab) -> Exhibit:
    """Computes cos and cos(cos): two operators, and one fused."""
    x, y = _arrays(lab)
    n = x.numel()
    once, fused = lab.expect(bytes=8 * n, special=n), lab.expect(bytes=8 * n, special=2 * n)

    def twice() -> None:
        torch.cos(x, out=y)
        torch.cos(y, out=y)

    def lesson(us: Mapping[str, float]) -> str:
        own, eager, one = us["cos"], us["cos(cos), two operators"], us["cos(cos), fused"]
        return (
            f"The second cosine adds {percent(eager / own - 1)} as an operator of its own and {percent(one / own - 1)} fused, "
            "where it moves no bytes."
        )

    return Exhibit(
        title="Fusion: cos(cos(x))",
        does=f"Cosines of {count(x.nbytes, 'B')} of numbers. Fused, the first result never leaves the processor. The "
        "prediction takes the rate of an exponential.",
        cases=(
            ExhibitCase(name="cos", expected=once, work=lambda: torch.cos(x, out=y)),
            ExhibitCase(name="cos(cos), two operators", expected=one_after_another([once, once]), work=twice),
            ExhibitCase(name="cos(cos), fused", expected=fused, work=_compiled(_cos_cos, x, y)),
        ),
        lesson=lesson,
    )


def softmaxes(lab: Lab) -> Exhibit:
    """Computes a softmax as five operators, and as one."""
    flat, other = _arrays(lab, LARGE[lab.device.type] // 2)
    x, y = flat.view(-1, 4096), other.view(-1, 4096)
    n, rows = x.numel(), torch.empty(x.shape[0], 1, device=lab.device)
    where = torch.empty(x.shape[0], 1, dtype=torch.int64, device=lab.device)

    def eager() -> None:
        torch.max(x, -1, keepdim=True, out=(rows, where))
        torch.sub(x, rows, out=y)
        torch.exp(y, out=y)
        torch.sum(y, -1, keepdim=True, out=rows)
        torch.div(y, rows, out=y)

    # maximum and sum read; subtraction, exponential and division read and write
    reads, passes = [lab.expect(bytes=4 * n)] * 2, [lab.expect(bytes=8 * n)] * 2
    separate = one_after_another([*reads, *passes, lab.expect(bytes=8 * n, special=n)])

    def lesson(us: Mapping[str, float]) -> str:
        parts, whole = us["five operators"], us["one operator"]
        return (
            f"The same numbers take {parts / whole:.1f} times as long in five operators, which move {count(32 * n, 'B')} in "
            f"place of {count(8 * n, 'B')}."
        )

    return Exhibit(
        title="Fusion: softmax",
        does=f"A softmax over rows of 4,096 of {count(x.nbytes, 'B')}: maximum, subtraction, exponential, sum, division.",
        cases=(
            ExhibitCase(name="five operators", expected=separate, work=eager),
            ExhibitCase(
                name="one operator", expected=lab.expect(bytes=8 * n, special=n), work=lambda: torch.softmax(x, -1, out=y)
            ),
        ),
        lesson=lesson,
    )


def _arrays(lab: Lab, nbytes: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.rand((nbytes or LARGE[lab.device.type]) // 4, device=lab.device)
    return x, torch.zeros_like(x)


def _cos_cos(x: Tensor, y: Tensor) -> None:
    y.copy_(x.cos().cos())


def _repeated(times: int, x: Tensor, y: Tensor) -> Callable[[], Any]:
    def chain(x: Tensor, y: Tensor) -> None:
        value = x
        for _ in range(times):
            value = value * FACTOR + SUMMAND
        y.copy_(value)

    # code of its own for each rung: Dynamo compiles none more than eight times
    code = chain.__code__.replace(co_name=f"chain_of_{times}")
    own = FunctionType(code, chain.__globals__, code.co_name, None, chain.__closure__)
    return _compiled(own, x, y)


def _compiled(function: Callable[..., None], x: Tensor, y: Tensor) -> Callable[[], Any]:
    # a multiplication and an addition are one instruction on a GPU anyway
    options: dict[str, Any] = {} if x.is_cuda else {"cpp.enable_floating_point_contract_flag": "fast"}
    made = torch.compile(function, fullgraph=True, options=options)
    return lambda: made(x, y)
