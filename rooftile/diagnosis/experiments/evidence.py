"""Evidence: the measurements of one operator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

# the names of experiments in `Evidence.why_not`
INTENSITY, CACHE, SIZE = "intensity", "cache", "size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The measurements of one call of an operator. An experiment that was not possible leaves None and its reason."""

    time_us: float  # T0: alone, median
    spread_us: float  # standard error of that median
    in_context_us: float | None
    added_us: tuple[float, ...] = ()  # E4: arithmetic added, in time that it takes alone
    swept_us: tuple[float, ...] = ()  # ... and the operator's time with it
    slope: float | None = None  # between the two references: 0 is an addition, 1 is 256 multiply-adds
    knee_flops_per_byte: float | None = None
    cached_us: float | None = None  # E5
    gain: float | None = None  # 1 - cached_us / time_us
    fixed_us: float | None = None  # E6
    why_not: dict[str, str] = field(default_factory=dict)  # experiment -> the reason why it was not possible

    def or_better(self, other: Evidence) -> Evidence:
        """Returns this with the time, the cache and the sizes of another measurement of the same call, if that one spreads less
        and has all of them.

        E4 stays: its slope follows from times of its own.
        """
        if other.spread_us * self.time_us >= self.spread_us * other.time_us:
            return self
        if (self.cached_us is not None and other.cached_us is None) or (self.fixed_us is not None and other.fixed_us is None):
            return self
        reasons = {name: why for name, why in self.why_not.items() if name == INTENSITY}
        return replace(
            self, time_us=other.time_us, spread_us=other.spread_us, cached_us=other.cached_us, gain=other.gain,
            fixed_us=other.fixed_us, why_not=reasons | other.why_not,
        )  # fmt: skip
