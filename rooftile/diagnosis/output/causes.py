"""The causes of a step's time that matter, each with its evidence and the one change that saves most of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rooftile.diagnosis.output.json_rows import Op, StepSummary
from rooftile.diagnosis.output.units import duration, percent
from rooftile.diagnosis.remedies.remedy import BATCH, COMPILE, FUSE, GRAPH, Remedy

# causes that are shown, and the least share of the step that one must have
MOST, LEAST = 3, 0.05
PHASES = {"forward": "forward", "backward": "backward", "optimiser": "optimiser"}
HEADS = {
    "memory": "traffic to memory", "compute": "arithmetic", "overhead": "overhead of operators", "latency": "latency of kernels",
    "communication": "communication", "host": "waiting for the host",
}  # fmt: skip
# remedies of the step as a whole, by what they remove
OF_THE_STEP = {
    "host": ("remove a wait", "load beside the step", "remove a synchronisation", "pin and overlap a copy"),
    "overhead": (GRAPH, BATCH, COMPILE, FUSE), "latency": (BATCH, COMPILE, FUSE),
}  # fmt: skip


class Cause(NamedTuple):
    """One bound of the step, its share of the time, its evidence, and the remedy that saves most of it."""

    bound: str
    share: float
    evidence: str
    remedy: Remedy | None

    def head(self) -> str:
        """Returns the cause and its evidence."""
        return f"{HEADS[self.bound]}, {percent(self.share)} of the step: {self.evidence}"

    def advice(self, step_us: float) -> str:
        """Returns the one thing to do."""
        if self.remedy is None:
            return "no change is known that saves a part of it"
        saved_us = self.remedy.saving_us
        return f"{self.remedy.name} saves {duration(saved_us)} ({percent(saved_us / step_us)}); {self.remedy.how}"


def contents(ops: Sequence[Op]) -> str:
    """Returns what one step contains: the calls of operators in each phase."""
    calls = dict.fromkeys(PHASES, 0)
    for op in ops:
        calls[op.phase] = calls.get(op.phase, 0) + op.calls
    parts = [f"{PHASES.get(phase, phase)} {count:,}" for phase, count in calls.items() if count]
    return f"One step calls {sum(calls.values()):,} operators ({', '.join(parts)})." if parts else ""


def causes(step: StepSummary, ops: Sequence[Op], remedies: Sequence[Remedy]) -> list[Cause]:
    """Returns the causes with the largest shares of the step, at most three."""
    ranked = sorted(((share, bound) for bound, share in step.shares.items() if bound in HEADS and share >= LEAST), reverse=True)
    return [Cause(bound, share, _evidence(bound, step, ops), _best(bound, ops, remedies)) for share, bound in ranked[:MOST]]


def _evidence(bound: str, step: StepSummary, ops: Sequence[Op]) -> str:
    if bound == "host":
        places = sorted(step.host_us.items(), key=lambda item: -item[1])[:2]
        waits = [f"{percent(us / step.time_us)} in {words}" for words, us in places]
        named = {"sync": "waiting for the device", "copy": "copying between host and device"}
        waits += [f"{percent(us / step.time_us)} {named[cause]}" for cause, us in step.idle_us.items() if us and cause in named]
        return ", ".join(waits) or "nothing ran meanwhile"
    exchange_us = step.idle_us.get("exchange", 0.0)
    if bound == "communication" and exchange_us:
        return f"{percent(exchange_us / step.time_us)} waiting for what other processes send"
    its = [op for op in ops if op.bound == bound]
    if bound == "overhead" and step.launches:
        gaps_us = step.between_us
        between = f", {duration(gaps_us)} between them" if gaps_us else ""
        return f"{step.launches:,} operators{between}"
    total = sum(op.time_us for op in its)
    if not total:
        return "by the step's own measurements"
    times: dict[str, float] = {}
    for op in its:
        name = op.op.split("::")[-1]
        times[name] = times.get(name, 0.0) + op.time_us
    names = sorted(times, key=lambda name: -times[name])
    tried = sum(op.time_us for op in its if op.confidence in ("confirmed", "measured")) / total
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; {percent(tried)} of it by experiment"


def _best(bound: str, ops: Sequence[Op], remedies: Sequence[Remedy]) -> Remedy | None:
    """Returns the remedy with the largest saving that takes time of this bound."""
    rows = {n for n, op in enumerate(ops) if op.bound == bound}
    fitting = [
        remedy for remedy in remedies
        if remedy.saving_us > 0 and (remedy.name in OF_THE_STEP.get(bound, ()) or rows & set(remedy.ops))
    ]  # fmt: skip
    return max(fitting, key=lambda remedy: remedy.saving_us, default=None)
