"""Times one case on its providers, interleaved, each checked first.

    rows = measure(CASES["cpu-causal-1024"], providers=("rooftile", "standard"))

A provider that cannot run a case, fails, runs out of memory or computes something else gives rows with a reason and no
time; the others go on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rooftile.cost import roof
from rooftile.cost.flops import check_phase
from rooftile.cost.session import Session, open_session
from rooftile.errors import InvalidInput
from rooftile.exact.cases import Case, Inputs
from rooftile.exact.spec import Problem
from rooftile.hardware.clock import Clock, clock_for
from rooftile_lab.bench import peers
from rooftile_lab.bench.check import Conformance
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row

__all__ = ["Progress", "Session", "measure", "open_session"]

Progress = Callable[[str], None]

# a call that has taken so long in all takes no further turns
PATIENCE_US = 10e6


@dataclass(slots=True)
class _Contestant:
    """A provider on one case, with its errors, memory and times."""

    name: str
    ran: dict[str, str] = field(default_factory=dict)  # by phase
    forward: Callable[[], Tensor] | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)


def measure(
    case: Case,
    providers: Sequence[str] = ("rooftile", "standard"),
    phases: Sequence[str] = ("fwd", "bwd"),
    device: torch.device | str = "cpu",
    rounds: int = 5,
    check: bool = True,
    on_progress: Progress | None = None,
    session: Session | None = None,
) -> list[Row]:
    """One Row per provider and phase, in that order.

    Args:
        case: one of `rooftile.exact.cases`, or any other.
        providers: names of `bench.peers.names()`; "rooftile" is the automatic choice.
        phases: "fwd" is timed without gradients; "bwd" is the backward alone, by torch.autograd.grad on a kept graph.
        rounds: how often all providers take turns, back and forth. A turn is about 25 ms of calls, or one call.
        check: compare with the fp64 definition first, and time nothing that differs.
        on_progress: called with a few words before each step.
        session: the run that the rows belong to; by default a new one on `device`.

    Example:
        >>> rows = measure(CASES["cpu-causal-256"], ("rooftile", "standard"), phases=("fwd",))
        >>> print(rows[0].median_us, rows[0].roofline_percent)
    """
    for phase in phases:
        check_phase(phase)
    if rounds < 1:
        raise InvalidInput(f"rounds is {rounds}; must be at least 1")
    chosen = [peers.provider_named(name) for name in providers]
    session = session or open_session(device)
    clock = clock_for(session.device)
    with torch.cuda.device(session.device) if session.device.type == "cuda" else nullcontext():
        contestants = _contest(case, chosen, phases, rounds, check, on_progress or (lambda words: None), clock, session.device)
    return [_row(contestant, phase, case, session, clock) for contestant in contestants for phase in phases]


def _contest(
    case: Case,
    chosen: Sequence[peers.Provider],
    phases: Sequence[str],
    rounds: int,
    check: bool,
    say: Progress,
    clock: Clock,
    device: torch.device,
) -> list[_Contestant]:
    needs_grad = "bwd" in phases
    say(f"{case.name}: the definition" if check else f"{case.name}: inputs")
    inputs = case.inputs(device, requires_grad=needs_grad)
    q, v = inputs.tensors[0], inputs.tensors[2]
    do = torch.randn((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=device) if needs_grad else None
    conformance = Conformance(case, inputs, needs_grad=needs_grad) if check else None
    contestants = []
    for provider in chosen:
        say(f"{case.name}: {provider.name}")
        contestants.append(_ready(provider, case, inputs, do, phases, conformance, clock))
    for turn in range(rounds):
        say(f"{case.name}: round {turn + 1} of {rounds}")
        # back and forth: a chip clocks lower after a busy neighbour, and no contestant should always come after the same one
        for contestant in contestants[:: -1 if turn % 2 else 1]:
            _take_turn(contestant, inputs, do, phases, clock)
    return contestants


def _ready(
    provider: peers.Provider,
    case: Case,
    inputs: Inputs,
    do: Tensor | None,
    phases: Sequence[str],
    conformance: Conformance | None,
    clock: Clock,
) -> _Contestant:
    """Prepares and checks a provider, and measures its memory; an error becomes its reason."""
    found, device = _Contestant(provider.name), inputs.tensors[0].device

    def prepare() -> None:
        for phase in phases:
            reason = provider.reason(case, device, phase == "bwd")
            if reason is not None:
                found.reasons[phase] = f"refused: {reason}"
            else:
                found.ran[phase] = peers.backend_that_runs(provider.name, case, device, phase == "bwd")
        if not found.ran:
            return
        found.forward = provider.prepare(case, inputs)
        for phase in phases:
            if phase not in found.reasons:
                _examine(found, phase, inputs, do, conformance, clock)

    _guarded(found, phases, prepare)
    return found


def _examine(
    found: _Contestant, phase: str, inputs: Inputs, do: Tensor | None, conformance: Conformance | None, clock: Clock
) -> None:
    """Checks one phase against the definition and takes its peak memory."""
    assert found.forward is not None
    step = _step(found.forward, inputs, phase)
    if conformance is None:
        step(do)
    else:
        answer = step(conformance.do)
        errors = conformance.errors(answer)
        found.errors[phase] = max(errors[name] for name in (("o",) if phase == "fwd" else ("dq", "dk", "dv")))
        complaint = conformance.complaint(answer)
        if complaint is not None:
            found.reasons[phase] = f"wrong: {complaint}"
            return
        del answer
    found.peaks[phase] = clock.peak_bytes(lambda: step(do))


def _step(forward: Callable[[], Tensor], inputs: Inputs, phase: str) -> Callable[[Tensor | None], dict[str, Tensor]]:
    """A phase as a program runs it, as a function of do: the forward without gradients, or forward and backward."""

    def alone(do: Tensor | None) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"o": forward()}

    def both(do: Tensor | None) -> dict[str, Tensor]:
        o = forward()
        grads = torch.autograd.grad(o, inputs.tensors[:3], do)
        return {"o": o.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return alone if phase == "fwd" else both


def _take_turn(contestant: _Contestant, inputs: Inputs, do: Tensor | None, phases: Sequence[str], clock: Clock) -> None:
    """Takes one round of samples in each phase. The backward's graph is freed after its turn, so one is held at a time."""
    for phase in phases:

        def turn(phase: str = phase) -> None:
            assert contestant.forward is not None
            work = timed_work(contestant.forward, inputs, do, phase)
            contestant.times.setdefault(phase, []).extend(clock.samples(work))

        if phase not in contestant.reasons and sum(contestant.times.get(phase, [])) < PATIENCE_US:
            _guarded(contestant, (phase,), turn)


def timed_work(forward: Callable[[], Tensor], inputs: Inputs, do: Tensor | None, phase: str) -> Callable[[], object]:
    """The call that is timed: a forward without gradients, or the backward alone, on a graph that is kept."""
    if phase == "fwd":

        def alone() -> Tensor:
            with torch.no_grad():
                return forward()

        return alone
    o = forward()
    return lambda: torch.autograd.grad(o, inputs.tensors[:3], do, retain_graph=True)


def _guarded(contestant: _Contestant, phases: Sequence[str], work: Callable[[], None]) -> None:
    """Runs work. An error becomes the reason of every phase without a reason, and the run goes on.

    This is the one place that catches whatever a provider raises: peers are other people's programs, and a table of
    thirty cases should not end at the first that runs out of memory. The reason goes into the row, with the warnings
    before it, in which torch explains why it took no kernel.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            work()
        except Exception as error:
            words = [f"{type(error).__name__}: {error}", *(str(warning.message) for warning in seen)]
            reason = "failed: " + " ".join("; ".join(words).split())[:600]
            for phase in phases:
                contestant.reasons.setdefault(phase, reason)
            seen.clear()
            if torch.cuda.is_available():
                # the memory that it had reserved would be missing for the next one
                torch.cuda.empty_cache()
    for warning in seen:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _row(contestant: _Contestant, phase: str, case: Case, session: Session, clock: Clock) -> Row:
    problem = case.problem(session.machine.arch, needs_grad=phase == "bwd")
    reason = contestant.reasons.get(phase, "")
    return timed_row(
        session,
        [] if reason else contestant.times.get(phase, []),
        dtype=case.dtype,
        roof=roof(problem, session.ceilings, phase),
        suite="attention",
        case=case.name,
        backend=contestant.name,
        ran=contestant.ran.get(phase, ""),
        phase=phase,
        problem=words_of(problem),
        error=contestant.errors.get(phase),
        peak_bytes=contestant.peaks.get(phase),
        peak_kind=clock.peak_kind,
        reason=reason,
    )


def words_of(problem: Problem) -> str:
    """A spec and its sizes in words."""
    sizes = problem.sizes
    return f"{problem.spec}, B {sizes.B} T {sizes.T} S {sizes.S} H {sizes.H} Hk {sizes.Hk}"
