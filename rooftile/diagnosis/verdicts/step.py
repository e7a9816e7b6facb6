"""The verdict on a whole step: the shares of its time by bound, and whether the host, overhead or the device holds it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rooftile.diagnosis.verdicts.findings import Finding

# twice the batch in at most this much of the time: the work of the batch is not what takes the time
SAME = 1.1
# ... and in at least this much: it is
GROWS = 1.6
HALF = 0.5
# a part of a CPU's step that neither operators nor gaps explain is unknown if it is more than this
UNEXPLAINED = 0.02
CAUSES = ("host", "exchange", "sync", "copy", "dependency")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """The measurements of a whole step. An experiment that was not possible leaves None, and its reason in `why_not`."""

    time_us: float
    spread_us: float = 0.0
    graph_us: float | None = None  # E1 on a GPU
    half_batch_us: float | None = None  # E2
    double_batch_us: float | None = None
    # E3: time in which nothing runs, by cause; in "host" only the time between launches
    idle_us: Mapping[str, float] = field(default_factory=dict)
    # the part of "host" that lies in single lines that wait for something else: data, a sleep
    waiting_us: float = 0.0
    why_not: Mapping[str, str] = field(default_factory=dict)
    host_us: Mapping[str, float] = field(default_factory=dict)  # the host's time on something else than operators, by place


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """The bound of a step, and the shares of its time, which add up to 1."""

    bound: str | None
    shares: dict[str, float]  # by bound, largest first; "unknown" where an operator has no bound
    overhead_share: float | None
    confidence: str
    notes: tuple[str, ...]


def classify_step(step: StepEvidence, findings: Sequence[Finding]) -> StepVerdict:
    """Returns the verdict on a step from its own measurements and the findings of its operators.

    Overhead is measured by E1: 1 - time as a CUDA graph / time, and on a CPU the fixed parts of all operators with the time
    between them. Doubling the batch (E2) confirms or contradicts it, and decides where there is no E1.
    """
    overhead = _overhead_share(step, findings)
    shares = _shares(step, findings, overhead or 0.0)
    grows = None if step.double_batch_us is None else step.double_batch_us / step.time_us
    bound, confidence, notes = _bound(shares, overhead, grows, findings)
    return StepVerdict(bound=bound, shares=shares, overhead_share=overhead, confidence=confidence, notes=tuple(notes))


def _overhead_share(step: StepEvidence, findings: Sequence[Finding]) -> float | None:
    if step.graph_us is not None:
        # no graph has in it what the host waits for
        return min(1.0, max(0.0, 1 - (step.graph_us + _waits_us(step)) / step.time_us))
    gaps_us = max(0.0, step.idle_us.get("host", 0.0) - step.waiting_us)
    on_cpu = [f for f in findings if f.operation.device == "cpu"]
    fixed_us = sum(f.fixed_us * f.operation.calls for f in on_cpu)
    if not step.idle_us and not on_cpu:
        return None
    return min(1.0, (gaps_us + fixed_us) / step.time_us)


def _waits_us(step: StepEvidence) -> float:
    """The time in which the host waits for data, the device or a copy."""
    return step.waiting_us + step.idle_us.get("sync", 0.0) + step.idle_us.get("copy", 0.0)


def _shares(step: StepEvidence, findings: Sequence[Finding], overhead: float) -> dict[str, float]:
    host = min(1.0 - overhead, _waits_us(step) / step.time_us)
    exchange = min(1.0 - overhead - host, step.idle_us.get("exchange", 0.0) / step.time_us)
    times: dict[str, float] = {}
    for f in findings:
        # the fixed parts of a CPU's operators are in the overhead already
        fixed_us = f.fixed_us * f.operation.calls if f.operation.device == "cpu" else 0.0
        bound = f.verdict.bound or "unknown"
        if bound in ("overhead", "host"):
            modelled = f.verdict.modelled_bound or "unknown"
            # what a GPU's kernel waits for is in the step's overhead; a CPU's operator waits for itself, such as for its Python
            of_itself = f.operation.device == "cpu" and bound == "overhead"
            bound = bound if of_itself else "unknown" if modelled in ("overhead", "host") else modelled
        times[bound] = times.get(bound, 0.0) + max(0.0, f.time_us - fixed_us)
    rest, total = 1.0 - overhead - host - exchange, sum(times.values())
    shares = {"overhead": overhead, "host": host, "communication": exchange}
    explained, on_cpu = rest, bool(findings) and all(f.operation.device == "cpu" for f in findings)
    # a GPU's kernels are the rest of its step; a CPU may have been busy with something else, which no operator explains
    if on_cpu and rest - total / step.time_us > UNEXPLAINED:
        explained = total / step.time_us
        shares["unknown"] = rest - explained
    for bound, us in times.items() if total else [("unknown", 1.0)]:
        shares[bound] = shares.get(bound, 0.0) + explained * us / (total or 1.0)
    return dict(sorted(((b, s) for b, s in shares.items() if s > 0), key=lambda item: -item[1]))


def _bound(
    shares: Mapping[str, float], overhead: float | None, grows: float | None, findings: Sequence[Finding]
) -> tuple[str | None, str, list[str]]:
    if shares.get("host", 0.0) >= HALF:
        return "host", "measured", []
    if overhead is None:
        if grows is not None and grows <= SAME:
            return "overhead", "measured", [f"twice the batch takes {grows:.2f} times as long; no graph was measured"]
        return _largest(shares), _weakest(findings), []
    same = grows is not None and grows <= SAME
    # near half, the second experiment decides
    if overhead >= HALF or (same and overhead >= 2 / 3 * HALF):
        if grows is not None and grows >= GROWS:
            note = f"{100 * overhead:.0f} % is overhead, and yet twice the batch takes {grows:.2f} times as long"
            return "overhead", "contradicted", [f"{note}: the number of operators grows with the batch"]
        return "overhead", "confirmed" if same else "measured", []
    notes = []
    if same:
        notes = [
            f"twice the batch takes only {grows:.2f} times as long, and yet {100 * overhead:.0f} % is overhead: the time goes "
            "into data that all examples share, such as weights"
        ]
    return _largest(shares), _weakest(findings), notes


def _largest(shares: Mapping[str, float]) -> str | None:
    """Returns the bound with over half of the time or one and a half times the next; "balanced" without one."""
    ranked = sorted(((share, bound) for bound, share in shares.items()), reverse=True)
    if not ranked:
        return None
    (first, bound), second = ranked[0], ranked[1][0] if len(ranked) > 1 else 0.0
    if first < HALF and first < 1.5 * second:
        return "balanced"
    return None if bound == "unknown" else bound


def _weakest(findings: Sequence[Finding]) -> str:
    """Returns the confidence that at least 90 % of the operators' time has: their verdicts carry the step's."""
    total = sum(f.time_us for f in findings)
    for confidences in (("confirmed",), ("confirmed", "measured")):
        if total and sum(f.time_us for f in findings if f.verdict.confidence in confidences) >= 0.9 * total:
            return confidences[-1]
    return "modelled"
