"""Compares Rooftile with PyTorch's SDPA and standard attention, from short sequences up to each side's limit of time or memory.

Standard attention is a matrix product, a softmax and a matrix product in plain PyTorch, with the whole T x S matrix in memory.
There is no mask, so that neither side gains by skipping tiles. `rooftile_lab.bench` checks and measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rooftile.cost import io
from rooftile.drawing.units import duration, size
from rooftile.exact import dispatch
from rooftile.exact.cases import Case
from rooftile.exact.spec import Problem
from rooftile.hardware.device import describe
from rooftile.runtime.devices import arch
from rooftile_lab.bench import run
from rooftile_lab.bench.results import Row
from rooftile_lab.report.plan import Plan
from rooftile_lab.report.spread import relative

OURS, SDPA, STANDARD = "rooftile", "sdpa", "standard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One side at one length. Times are medians; errors are relative to fp64, |x - exact| / |exact|, on sampled rows."""

    side: str
    N: int
    forward_us: float
    backward_us: float  # the backward alone
    forward_peak_bytes: int  # beyond the inputs
    training_peak_bytes: int  # forward and backward, beyond the inputs
    forward_error: float  # the error of o
    backward_error: float  # the largest of dq, dk, dv
    forward_spread: float = 0.0  # as in `rooftile_lab.report.spread`
    backward_spread: float = 0.0

    @property
    def step_us(self) -> float:
        return self.forward_us + self.backward_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The cost model's bytes at one length, forward and backward together."""

    N: int
    standard: int  # scores and probabilities through memory
    tiled: int  # the reads and writes of every tile, from cache or memory
    compulsory: int  # each input read once, each output written once


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All readings, the bytes of the cost model, and the reason why each side stopped."""

    dtype: str
    batch: int
    heads: int
    dim: int
    backends: dict[str, str]  # per side: the backend or peer of `rooftile_lab.bench` that ran
    peak_kind: str  # how memory was measured
    readings: tuple[Reading, ...]
    traffic: tuple[Traffic, ...]
    stopped: dict[str, str]

    @property
    def spreads(self) -> list[float]:
        """Returns the spreads of all times."""
        return [spread for one in self.readings for spread in (one.forward_spread, one.backward_spread)]

    def of(self, side: str) -> dict[int, Reading]:
        """Returns one side's readings by length."""
        return {reading.N: reading for reading in self.readings if reading.side == side}

    @property
    def sides(self) -> list[str]:
        return [side for side in self.backends if self.of(side)]


def compare(plan: Plan, device: str, on_step: Callable[[float, str], None]) -> Comparison:
    """Runs every side over the plan's lengths; on_step is called with the fraction done and the next step.

    Rooftile's side is a kernel of its own, also where dispatch would choose PyTorch's: that one has its own side.
    """
    session = run.open_session(device)
    backends = _sides(plan, device)
    readings: list[Reading] = []
    stopped: dict[str, str] = {}
    traffic = []
    peak_kind = ""
    for n, N in enumerate(plan.lengths):
        case = case_of(plan, N)
        problem = case.problem(arch(torch.device(device)))
        for side in backends:
            earlier = [reading for reading in readings if reading.side == side]
            if side not in stopped and (reason := too_much(plan, side, problem, earlier, memory_limit(plan, device))):
                stopped[side] = reason
        running = [side for side in backends if side not in stopped]
        # each length costs about four times as much as the one before
        say = lambda words, n=n, N=N: on_step(4.0 ** (n + 1 - len(plan.lengths)), f"{words}, {N:,} tokens")  # noqa: E731
        rows = run.measure(
            case, [backends[side] for side in running], device=device, rounds=plan.rounds, session=session,
            on_progress=lambda words, say=say: say(words.split(": ", 1)[1]),
        ) if running else []  # fmt: skip
        for side, forward, backward in zip(running, rows[::2], rows[1::2], strict=True):
            peak_kind = forward.peak_kind
            if reason := forward.reason or backward.reason:
                stopped[side] = f"at {N:,} tokens it {reason}"
            else:
                readings.append(_reading(side, N, forward, backward))
        traffic.append(_traffic(problem))
    return Comparison(
        dtype=plan.dtype, batch=plan.batch, heads=plan.heads, dim=plan.dim, backends=backends, peak_kind=peak_kind,
        readings=tuple(readings), traffic=tuple(traffic), stopped=stopped,
    )  # fmt: skip


def case_of(plan: Plan, N: int) -> Case:
    """Returns the plan's problem at one length."""
    return Case(
        name=f"report-{N}", tags=frozenset(), B=plan.batch, T=N, S=N, H=plan.heads, Hk=plan.heads, dim=plan.dim,
        dtype=plan.dtype,
    )  # fmt: skip


def memory_limit(plan: Plan, device: str) -> int:
    """Returns the memory limit of a step in bytes: the plan's, or a third of a smaller machine's memory."""
    return min(plan.memory_limit, describe(device).memory_bytes // 3)


def too_much(plan: Plan, side: str, problem: Problem, earlier: list[Reading], limit: int) -> str:
    """Returns why the next step of a side is skipped, from the cost model and its last step; "" if it runs."""
    N = problem.sizes.T
    need = io.standard_peak(problem, "bwd") if side == STANDARD else io.flash_peak(problem, "bwd")
    if need > limit:
        return f"at {N:,} tokens its score matrices alone would need {size(need)}; this page allows {size(limit)}"
    if earlier:
        last = earlier[-1]
        expected = last.step_us * (N / last.N) ** 2
        if expected > plan.patience * 1e6:
            waits = duration(plan.patience * 1e6)
            return f"at {N:,} tokens a forward and backward would take about {duration(expected)}; this page waits {waits}"
    return ""


def _sides(plan: Plan, device: str) -> dict[str, str]:
    """Returns the sides, and the backend or peer of each."""
    spec = case_of(plan, plan.lengths[0]).problem(arch(torch.device(device))).spec
    own = next(name for name, reasons in dispatch.verdicts(spec).items() if not reasons and name != "sdpa")
    return {OURS: own, SDPA: "torch-flash", STANDARD: "standard"}


def _reading(side: str, N: int, forward: Row, backward: Row) -> Reading:
    values = (
        forward.median_us,
        backward.median_us,
        forward.peak_bytes,
        backward.peak_bytes,
        forward.error,
        backward.error,
    )
    assert all(value is not None for value in values)
    names = (
        "forward_us",
        "backward_us",
        "forward_peak_bytes",
        "training_peak_bytes",
        "forward_error",
        "backward_error",
    )
    spreads = {
        f"{name}_spread": relative(row.low_us, row.median_us, row.high_us)
        for name, row in (("forward", forward), ("backward", backward))
    }
    return Reading(side=side, N=N, **dict(zip(names, values, strict=True)), **spreads)  # type: ignore[arg-type]


def _traffic(problem: Problem) -> Traffic:
    counts = {"standard": io.standard, "tiled": io.tiles, "compulsory": io.compulsory}
    both = {name: sum(count(problem, phase).total for phase in ("fwd", "bwd")) for name, count in counts.items()}
    return Traffic(N=problem.sizes.T, **both)
