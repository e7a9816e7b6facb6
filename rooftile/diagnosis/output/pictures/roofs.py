"""The ceilings of a machine as lines of its roofline, and the place of an operator under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rooftile.diagnosis.output.json_rows import Op
from rooftile.drawing.units import count

# roofs nearer to each other than this are one line
SAME = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRoof:
    """A ceiling: bytes per second of a memory, or FLOPs per second."""

    name: str
    rate: float  # per second
    is_memory: bool
    measured: float | None = None  # the measured rate, where an operator was faster and the line is drawn there

    def at(self, intensity: float) -> float:
        """Returns the FLOP/s that it allows at a number of FLOPs per byte."""
        return self.rate * intensity if self.is_memory else self.rate

    @property
    def words(self) -> str:
        return f"{self.name} {count(self.rate, 'B/s' if self.is_memory else 'FLOP/s')}"


class Spot(NamedTuple):
    """An operator in the chart: FLOPs per byte, and FLOP/s."""

    x: float
    y: float


def spot(op: Op) -> Spot | None:
    """Returns the place of an operator; None where its FLOPs or bytes are unknown or zero."""
    if not op.flops or not op.bytes or not op.time_us:
        return None
    return Spot(op.flops / op.bytes, op.flops / op.time_us * 1e6)


def roofs(ceilings: Mapping[str, Any], ops: Sequence[Op], on_gpu: bool) -> list[DrawnRoof]:
    """Returns the machine's roofs, none below an operator that was measured.

    An operator that was faster than the highest measured rate shows that the machine was busy when that was measured.
    """
    found = [
        DrawnRoof(name=name, rate=ceilings[key] * 1e9, is_memory=True)
        for key, name in (("copy_gbs", "HBM" if on_gpu else "DRAM"), ("cache_gbs", "L2" if on_gpu else "cache"))
        if _is_rate(ceilings.get(key))
    ]
    products = ceilings.get("matmul_tflops")
    rates = {name: rate for name, rate in products.items() if _is_rate(rate)} if isinstance(products, Mapping) else {}
    if _is_rate(ceilings.get("fma_tflops")):
        rates["fp32 without products"] = ceilings["fma_tflops"]
    peaks = {name: rate * 1e12 for name, rate in rates.items()}
    # a slow dtype that no operator uses would be a line below the operators of another
    met = [op.ceiling for op in ops if op.ceiling is not None]
    peaks = {
        name: rate
        for name, rate in peaks.items()
        if rate == max(peaks.values()) or any(rate / SAME <= ceiling <= rate * SAME for ceiling in met)
    }
    found += _merged([DrawnRoof(name=name, rate=rate, is_memory=False) for name, rate in peaks.items()])
    return [_raised(roof, found, ops) for roof in found]


def under(after: Spot, lines: Sequence[DrawnRoof]) -> Spot:
    """A rate that no memory allows at the old intensity has moved fewer bytes; one above all peaks, fewer FLOPs."""
    rate = min(after.y, max((roof.rate for roof in lines if not roof.is_memory), default=after.y))
    fastest = max((roof.rate for roof in lines if roof.is_memory), default=0.0)
    return Spot(max(after.x, rate / fastest), rate) if fastest else Spot(after.x, rate)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _merged(found: Sequence[DrawnRoof]) -> list[DrawnRoof]:
    """Joins roofs that would be drawn on each other."""
    joined: list[DrawnRoof] = []
    for roof in sorted(found, key=lambda roof: -roof.rate):
        if joined and joined[-1].rate <= SAME * roof.rate:
            # "fp32" has room for its label, "fp32, fp32 without products" often has no room
            names = [*joined[-1].name.split(", "), roof.name]
            kept = [name for name in names if not any(name.startswith(f"{other} ") for other in names)]
            joined[-1] = replace(joined[-1], name=", ".join(kept))
        else:
            joined.append(roof)
    return joined


def _raised(roof: DrawnRoof, all_roofs: Sequence[DrawnRoof], ops: Sequence[Op]) -> DrawnRoof:
    """Raises a roof to the fastest operator that it limits: by the operator's own roof, and the highest of all."""
    spots = [(op, where) for op in ops if (where := spot(op)) is not None]
    highest = max(other.rate for other in all_roofs if other.is_memory == roof.is_memory)
    reached = [
        where.y / where.x if roof.is_memory else where.y
        for op, where in spots
        if roof.rate == highest or (op.roof is not None and op.roof in roof.name.split(", "))
    ]
    fastest = max(reached, default=0.0)
    return replace(roof, rate=fastest, measured=roof.rate) if fastest > roof.rate else roof
