"""The rows of a diagnosis: the program, its step, and its operators. Their fields have the names of the JSON.

Times and counts of an operator are of all its calls in the step, those under `experiments` of one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.output.units import duration
from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.drawing import notebook as shown
from rooftile.errors import InvalidInput

# a call alone that takes so much more or less than in the step is reported
ALIKE = 0.2
MODES = ("eager", "compiled", "graph")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program that was diagnosed."""

    command: str
    step: str  # the function, or how the step was found
    torch: str  # its version
    mode: str  # one of MODES

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInput(f"a program runs in mode {self.mode!r}; it must be one of {', '.join(MODES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step of the program. A value that is not known is None."""

    time_us: float
    spread_us: float | None
    launches: int | None  # kernels on a GPU, operators on a CPU
    flops: int | None
    bytes: int | None
    peak_bytes: int | None
    busy_us: float | None
    idle_us: dict[str, float]  # by cause: host, exchange, sync, copy, dependency
    overhead_share: float | None
    bound: str | None
    shares: dict[str, float]
    confidence: str
    experiments: dict[str, Any]  # graph_us, half_batch_us, double_batch_us, why_not
    host_us: dict[str, float] = field(default_factory=dict)  # the host's time on something else than operators, by place

    @property
    def between_us(self) -> float:
        """The time in which nothing ran because the next operator was not asked for yet; waits for data or others are no such."""
        waits_us = self.idle_us.get("exchange", 0.0) + self.shares.get("host", 0.0) * self.time_us
        return max(0.0, sum(self.idle_us.values()) - waits_us)

    def __repr__(self) -> str:
        return f"Step({duration(self.time_us or 0.0)}, {self.bound or 'without a verdict'}, {self.confidence})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One row of the table: an operator in its module and phase."""

    module: str
    op: str
    kernels: tuple[str, ...] = ()  # their names; none on a CPU
    calls: int
    phase: str
    time_us: float
    in_context_us: float | None  # in the step, where a call alone takes over 20 % more or less; else None
    share: float  # 0 to 1
    flops: int | None
    special: int | None
    bytes: int | None
    intensity: float | None  # FLOPs per byte
    roof: str | None  # the unit whose roof is nearer
    ceiling: float | None  # that roof, per second: FLOPs, special functions or bytes
    achieved: float | None  # in the same unit
    roof_share: float | None
    bound: str | None
    unit: str | None
    modelled_bound: str | None
    confidence: str
    confirmed_by: str
    experiments: dict[str, dict[str, Any]]  # alone, intensity, cache, size, why_not
    where: str
    remedies: tuple[int, ...] = ()  # positions in the diagnosis's list

    def __repr__(self) -> str:
        took = f"{shown.counted(self.calls, 'call')} in {duration(self.time_us or 0.0)}"
        return f"Op({self.module or '(step)'} {self.op}, {self.phase}: {took}, {self.bound or 'no verdict'}, {self.confidence})"


def row(finding: Finding, step_us: float, kernels: tuple[str, ...] = (), remedies: tuple[int, ...] = ()) -> Op:
    """Returns the row of a finding: counts and times of all its calls, and the roof that it is under."""
    its, verdict, evidence = finding.operation, finding.verdict, finding.evidence
    model = verdict.model
    per_call = {model.memory: its.bytes, "special": its.special}.get(model.roof or "", its.flops)
    roof_us, achieved_us = model.roof_us, finding.call_us
    return Op(
        module=its.module,
        op=its.op,
        kernels=kernels,
        calls=its.calls,
        phase=its.phase,
        time_us=finding.time_us,
        in_context_us=None if evidence is None or _is_alike(evidence) else (evidence.in_context_us or 0.0) * its.calls,
        share=finding.time_us / step_us,
        flops=_times(its.flops, its.calls),
        special=_times(its.special, its.calls),
        bytes=_times(its.bytes, its.calls),
        intensity=its.flops / its.bytes if its.flops is not None and its.bytes else None,
        roof=model.roof if roof_us else None,
        ceiling=per_call / roof_us * 1e6 if per_call and roof_us else None,
        achieved=per_call / achieved_us * 1e6 if per_call and roof_us and achieved_us else None,
        roof_share=roof_us / achieved_us if roof_us and achieved_us else None,
        bound=verdict.bound,
        unit=verdict.unit,
        modelled_bound=verdict.modelled_bound,
        confidence=verdict.confidence,
        confirmed_by=verdict.confirmed_by,
        experiments=_experiments(finding),
        where=its.where,
        remedies=remedies,
    )


def _is_alike(evidence: Evidence) -> bool:
    """Whether a call alone takes about as long as in the step."""
    context_us = evidence.in_context_us
    return context_us is None or abs(evidence.time_us - context_us) <= ALIKE * context_us


def _experiments(finding: Finding) -> dict[str, dict[str, Any]]:
    e = finding.evidence
    return {
        "alone": {"time_us": e.time_us if e else None, "spread_us": e.spread_us if e else None},
        "intensity": {
            "added_us": list(e.added_us) if e else [],
            "time_us": list(e.swept_us) if e else [],
            "slope": e.slope if e else None,
            "knee_flops_per_byte": e.knee_flops_per_byte if e else None,
        },
        "cache": {"time_us": e.cached_us if e else None, "gain": e.gain if e else None},
        "size": {"fixed_us": e.fixed_us if e else None},
        "why_not": dict(e.why_not) if e else {},
    }


def _times(count: int | None, calls: int) -> int | None:
    return None if count is None else count * calls
