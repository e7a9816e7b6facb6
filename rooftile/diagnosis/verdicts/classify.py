"""The verdict on one operator: what bounds it, which unit, and how sure that is.

Two numbers of the experiments decide. The slope s says how much of the added arithmetic is seen in the time: 0 nothing, 1 all
of it. The gain g is the share of the time that goes away with the traffic to main memory.

    fixed part over half of the time    overhead or latency
    s <= 1/3 and g >= 0.3               memory
    s >= 2/3 and g <= 0.15              compute
    g >= 2/3                            memory, where arithmetic and traffic do not overlap and both are seen
    s <= 1/3, 0.15 < g < 0.3, and next  memory, if the traffic takes half of the time at its roof
    to no arithmetic by the counts
    s <= 1/3 and g <= 0.15              a unit that neither experiment touches: the cache, or special functions
    s >= 2/3, and traffic that takes    compute: a gain of slices is a gain of a library's other programs
    a quarter of the time at its roof
    between these                       balanced

Counts that leave no doubt come before a number that is missing, and decide between two that are not decided: a call that reaches
75 % of one roof, where the other takes less than half of its time, is bound by that roof unless an experiment excludes it; a call
that computes nothing is never bound by arithmetic, and neither is one far below that roof only because the cache makes it no
faster: the cache may be little faster than main memory.

Where runs have 10 % of noise, these are right in 99 of 100 cases if the bound takes 2.5 times as long as each of the others
(tests/diagnosis/verdicts/test_classify.py). Experiments win over the model. Where both are decided and differ, the confidence is
"contradicted", unless the operator's arithmetic is so far below its roof that the model cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.verdicts.roofs import CLEAR, FAR, Model, Roofs, model, waiting

BOUNDS = ("memory", "compute", "overhead", "latency", "communication", "host", "balanced")
CONFIDENCES = ("confirmed", "measured", "modelled", "contradicted")

FLAT, STEEP = 1 / 3, 2 / 3
FALLS, STAYS = 0.3, 0.15
# with so much of the time, the traffic bounds it even where it overlaps with nothing
MOST = 2 / 3
FIXED = 0.5
# a call that reaches so much of a roof is bound by it, if the other roof takes less than this share of its time; a call that
# reaches more than this of a roof has a roof that was measured too low
REACHED, LEFT, ABOVE = 0.75, 0.5, 1.25
# traffic whose least time is less than this share of a call's time does not bound it
LITTLE = 0.25
# arithmetic takes none of a call's time if its least time is this many times shorter than the least time of the traffic
MANY = 10.0
# errors of the two numbers in standard errors of T0: g is a ratio of two times, s a difference over half of T0
GAIN_ERRORS, SLOPE_ERRORS = 2.0, 4.0

# the unit of a call that moves data and is no faster from the cache, far below the roof of main memory
ADDRESSES = "addresses"

COLLECTIVES = ("c10d::", "c10d_functional::", "_c10d_functional::", "symm_mem::")
SYNCHRONISING = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bound of one operator, and how sure it is."""

    bound: str | None  # one of BOUNDS; None if nothing is known
    unit: str | None  # "HBM", "L2", "DRAM", "cache", "addresses", "tensor", "fp32", "fp64", "special", "int", "link"
    modelled_bound: str | None
    confidence: str  # one of CONFIDENCES
    confirmed_by: str  # the numbers, or the reason why there are none
    model: Model


def classify(
    operation: OperatorRow, roofs: Roofs, evidence: Evidence | None = None, time_us: float | None = None
) -> Verdict:  # fmt: skip
    """Returns the verdict on one operator from its counts, the machine's ceilings and what was measured.

    evidence: None if no experiment was made.
    time_us: the time of one call in the step, for the model where there is no evidence.

    Example:
        >>> mm = Operation(module="", op="aten::mm", phase="forward", calls=1, flops=2 * 10**12, special=0, bytes=10**8,
        ...                where="", dtype="bf16", device="cuda", key=(), indices=(0,))
        >>> classify(mm, Roofs(memory="HBM", bytes_per_s=4e12, arithmetic="tensor", flops_per_s=7e14)).bound
        'compute'
    """
    modelled = model(operation, roofs, evidence.time_us if evidence else time_us)
    if operation.op.startswith(COLLECTIVES):
        return _verdict(modelled, "communication", "link", "measured", "it is a collective")
    if operation.device != "cpu" and operation.op in SYNCHRONISING:
        return _verdict(modelled, "host", None, "measured", "the host waits for the device's number")
    if evidence is None or evidence.slope is evidence.gain is evidence.fixed_us is None:
        return _verdict(modelled, modelled.bound, modelled.unit, "modelled", _reasons(operation, evidence, modelled))
    bound, unit = _measured(operation.device, roofs, modelled, evidence)
    if bound is None:
        return _verdict(modelled, modelled.bound, modelled.unit, "modelled", _reasons(operation, evidence, modelled))
    confidence = _confidence(bound, modelled, evidence)
    if confidence == "confirmed" and _bounds_within_errors(modelled, operation.device, roofs, evidence, by_counts=False) != {
        bound
    }:
        # the experiments alone do not say it with certainty
        confidence = "measured"
    return _verdict(modelled, bound, unit, confidence, _numbers(bound, confidence, modelled, evidence))


def settled(operation: OperatorRow, roofs: Roofs, evidence: Evidence) -> bool:
    """Returns whether the measurements are exact enough: no error of two standard errors gives another bound.

    Measure again while it is False and the budget lasts.
    """
    modelled = model(operation, roofs, evidence.time_us)
    return len(_bounds_within_errors(modelled, operation.device, roofs, evidence, by_counts=True)) == 1


def _bounds_within_errors(
    modelled: Model, device: str, roofs: Roofs, evidence: Evidence, *, by_counts: bool
) -> set[str | None]:  # fmt: skip
    """Returns the bounds that two standard errors of the measurements allow."""
    error = evidence.spread_us / evidence.time_us if evidence.time_us else 0.0
    found = set()
    for sign, sign_of_fixed in product((-1, 1), repeat=2):
        s, g, fixed_us = evidence.slope, evidence.gain, evidence.fixed_us
        moved = replace(
            evidence,
            slope=None if s is None else s + sign * SLOPE_ERRORS * error,
            gain=None if g is None else g - sign * GAIN_ERRORS * error,
            fixed_us=None if fixed_us is None else fixed_us * (1 + sign_of_fixed * GAIN_ERRORS * error),
        )
        found.add(_measured(device, roofs, modelled, moved, by_counts=by_counts)[0])
    return found


def _measured(
    device: str, roofs: Roofs, modelled: Model, evidence: Evidence, *, by_counts: bool = True
) -> tuple[str | None, str | None]:  # fmt: skip
    """Returns the bound and its unit by the experiments; with `by_counts`, counts that leave no doubt complete them."""
    s, g, fixed_us = evidence.slope, evidence.gain, evidence.fixed_us
    if fixed_us is not None and fixed_us > FIXED * evidence.time_us:
        return waiting(device, evidence.time_us, roofs), None
    doubtless = _doubtless(modelled) if by_counts else None
    if s is None and g is None:
        # a fixed part of less than half leaves the choice of a roof to the model, unless the counts leave no doubt
        return doubtless or (None, None)
    if doubtless is not None and (s is None or g is None):
        return doubtless
    if modelled.compute_us == 0 and modelled.memory_us:
        # it moves data and computes nothing: whatever takes its time is on the way of the data, if not main memory then the
        # addresses, as of the pieces of rows that a transposition reads
        is_below = g is not None and g <= STAYS and modelled.memory_us < LEFT * evidence.time_us
        return "memory", ADDRESSES if is_below else modelled.memory
    flat, steep = s is None or s <= FLAT, s is None or s >= STEEP
    falls, stays = g is None or g >= FALLS, g is None or g <= STAYS
    # a number that is missing fits both answers, so one experiment alone decides between the two roofs
    if s is not None and steep and modelled.memory_us is not None and modelled.memory_us < LITTLE * evidence.time_us:
        # the gain is of slices, for which a library has other programs
        return "compute", modelled.compute
    if (flat and falls) or (g is not None and g >= MOST):
        return "memory", modelled.memory
    if s is None and stays and modelled.bound == "memory" and modelled.memory == roofs.cache:
        return "memory", roofs.cache
    if steep and stays and (s is not None or _may_be_compute(modelled, evidence.time_us)):
        return "compute", modelled.compute
    if flat and stays and s is not None:
        return _untouched(modelled, roofs, evidence.time_us)
    if doubtless == ("memory", modelled.memory) and (s is None or s < STEEP):
        return doubtless
    if flat and not stays and _is_traffic(modelled, evidence.time_us):
        return "memory", modelled.memory
    if doubtless == ("compute", modelled.compute) and (s is None or s > FLAT) and (g is None or g < FALLS):
        return doubtless
    return "balanced", None


def _doubtless(modelled: Model) -> tuple[str, str] | None:
    """Returns the roof that the counts alone show to be the bound: it is nearly reached, and the other is far."""
    time_us, memory_us, compute_us = modelled.time_us, modelled.memory_us, modelled.compute_us
    if not time_us or memory_us is None or compute_us is None:
        return None
    for bound, unit, us, other_us in (
        ("memory", modelled.memory, memory_us, compute_us),
        ("compute", modelled.compute, compute_us, memory_us),
    ):
        if REACHED * time_us <= us <= ABOVE * time_us and other_us <= LEFT * time_us:
            return bound, unit
    return None


def _is_traffic(modelled: Model, time_us: float) -> bool:
    """Whether traffic takes over half of the time at its roof, and arithmetic next to nothing."""
    memory_us, compute_us = modelled.memory_us, modelled.compute_us
    return memory_us is not None and compute_us is not None and memory_us >= LEFT * time_us and compute_us <= memory_us / MANY


def _may_be_compute(modelled: Model, time_us: float) -> bool:
    """Whether arithmetic may bound a call of which only the gain is known, which stays: it takes a part of the time by count."""
    if modelled.compute_us is None or modelled.memory_us is None:
        return True
    return modelled.compute_us >= LEFT * time_us or modelled.compute_us > FAR * modelled.memory_us


def _untouched(modelled: Model, roofs: Roofs, time_us: float) -> tuple[str, str | None]:
    """Returns the bound of a call that neither more arithmetic nor less traffic changes, by the unit that explains its time."""
    if (doubtless := _doubtless(modelled)) is not None and doubtless[0] == "memory":
        # the cache is little faster than main memory
        return doubtless
    if modelled.compute == "special" and (modelled.compute_us or 0.0) > FIXED * time_us:
        return "compute", "special"
    if modelled.memory == roofs.cache and (modelled.memory_us or 0.0) > FIXED * time_us:
        return "memory", modelled.memory
    return "balanced", None


def _confidence(bound: str, modelled: Model, evidence: Evidence) -> str:
    roof_share = modelled.roof_share
    if bound in ("overhead", "latency"):
        if roof_share is None:
            return "measured"
        if roof_share > 1 - FIXED:
            return "contradicted"
        # E6 is one experiment; the other has to find at least one of the two roofs idle
        idle = (evidence.slope is not None and evidence.slope <= FLAT) or (evidence.gain is not None and evidence.gain <= STAYS)
        return "confirmed" if idle else "measured"
    decided = {"memory", "compute"}
    if bound in decided and modelled.bound in decided - {bound}:
        return "measured" if _below_its_roof(bound, modelled, evidence) else "contradicted"
    if evidence.slope is None or evidence.gain is None or bound != modelled.bound:
        return "measured"
    is_unclear = evidence.slope > FLAT or STAYS < evidence.gain < FALLS
    return "measured" if is_unclear and (bound == "memory" or evidence.gain > STAYS) else "confirmed"


def _below_its_roof(bound: str, modelled: Model, evidence: Evidence) -> bool:
    """Whether the call's own arithmetic is so far below its roof that the model cannot tell it from the traffic.

    The model says "memory" where traffic takes 1.5 times as long as arithmetic at its roof. A product with one row may take as
    long from the cache as from main memory, because its instructions are far from that roof. Then it is them that take the time.
    """
    if bound != "compute" or evidence.cached_us is None or modelled.memory_us is None or modelled.compute_us is None:
        return False
    arithmetic_us = evidence.cached_us - (evidence.fixed_us or modelled.fixed_us)
    return arithmetic_us > CLEAR * modelled.compute_us and modelled.memory_us < CLEAR * arithmetic_us


def _reasons(operation: OperatorRow, evidence: Evidence | None, modelled: Model) -> str:
    reason = "no experiment was made"
    if evidence is not None and evidence.why_not:
        reason = "no experiment: " + "; ".join(f"{name}: {reason}" for name, reason in evidence.why_not.items())
    elif operation.flops is None or operation.bytes is None:
        reason += ", and no rule counts it"
    if modelled.bound is None and modelled.roof_us and modelled.time_us:
        reason += (
            f"; it takes {modelled.time_us / modelled.roof_us:.0f} times as long as its roofs allow, which no count explains"
        )
    return reason


def _numbers(bound: str, confidence: str, modelled: Model, evidence: Evidence) -> str:
    words = ["model"] if confidence == "confirmed" else []
    if confidence == "contradicted":
        words.append(f"model says {modelled.bound}")
    elif modelled.bound == "memory" and _below_its_roof(bound, modelled, evidence):
        words.append(f"from the cache at {100 * (modelled.compute_us or 0) / (evidence.cached_us or 1):.0f} % of its roof")
    for name, value, experiment in (("slope", evidence.slope, "intensity"), ("gain", evidence.gain, "cache")):
        if value is not None:
            words.append(f"{name} {value:.2f}")
        elif experiment in evidence.why_not:
            words.append(f"no {name} ({evidence.why_not[experiment]})")
    if evidence.fixed_us is not None and evidence.time_us:
        words.append(f"fixed part {100 * evidence.fixed_us / evidence.time_us:.0f} %")
    return ", ".join(words)


def _verdict(modelled: Model, bound: str | None, unit: str | None, confidence: str, confirmed_by: str) -> Verdict:
    return Verdict(
        bound=bound,
        unit=unit,
        modelled_bound=modelled.bound,
        confidence=confidence,
        confirmed_by=confirmed_by,
        model=modelled,
    )
