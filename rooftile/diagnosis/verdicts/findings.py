"""A finding: one operator of the step, with its counts, evidence, time in the step and verdict."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.verdicts.classify import Verdict, classify
from rooftile.diagnosis.verdicts.roofs import CLEAR, Roofs


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Everything known about one operator. Counts and evidence are of one call, `time_us` of all its calls in the step."""

    operation: OperatorRow
    roofs: Roofs
    evidence: Evidence | None
    time_us: float
    verdict: Verdict

    @property
    def call_us(self) -> float:
        """The time of one call in the step."""
        return self.time_us / self.operation.calls

    @property
    def fixed_us(self) -> float:
        """The part of one call that does not shrink with its size: measured, else by the ceilings."""
        measured = self.evidence.fixed_us if self.evidence else None
        return min(self.call_us, self.roofs.fixed_us if measured is None else measured)

    @property
    def compute_us(self) -> float:
        """The time of one call's arithmetic, without the fixed part.

        It is the time from the cache (E5), if that is clearly more than the cache's bandwidth needs. Otherwise it is all the
        rest of the call where arithmetic bounds it, and the ceilings' time elsewhere.
        """
        rest_us, modelled = self.call_us - self.fixed_us, self.verdict.model.compute_us or 0.0
        cached = self.evidence.cached_us if self.evidence else None
        if cached is not None:
            rate = self.roofs.cache_bytes_per_s
            cache_us = (self.operation.bytes or 0) / rate * 1e6 if rate else 0.0
            if cached - self.fixed_us > CLEAR * cache_us:
                return min(rest_us, cached - self.fixed_us)
        return rest_us if self.verdict.bound == "compute" else min(rest_us, modelled)

    @property
    def traffic_us(self) -> float:
        """The time of one call's traffic: what it takes beyond the fixed part if memory bounds it, else by the ceilings."""
        moving_us = self.call_us - self.fixed_us
        return moving_us if self.verdict.bound == "memory" else min(moving_us, self.verdict.model.memory_us or 0.0)

    @property
    def unexplained_us(self) -> float:
        """The time of one call that neither traffic, arithmetic nor the fixed part explains."""
        return max(0.0, self.call_us - max(self.traffic_us, self.compute_us) - self.fixed_us)


def find(operation: OperatorRow, roofs: Roofs, evidence: Evidence | None, time_us: float | None = None) -> Finding:
    """Returns an operator's finding.

    time_us: of all its calls in the step; without it the time alone, times the calls.
    """
    alone_us = evidence.time_us * operation.calls if evidence else 0.0
    total_us = alone_us if time_us is None else time_us
    return Finding(
        operation=operation,
        roofs=roofs,
        evidence=evidence,
        time_us=total_us,
        verdict=classify(operation, roofs, evidence, total_us / operation.calls if total_us else None),
    )
