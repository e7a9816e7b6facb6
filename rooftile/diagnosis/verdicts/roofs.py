"""The model of one operator call: its least time on each unit of the machine, from its counts and measured ceilings.

time = max(bytes / bandwidth, FLOPs / rate, special functions / rate) + fixed
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.diagnosis.records import OperatorRow

# one of two roofs is the model's answer only if its time is this many times the other's
CLEAR = 1.5
# no roof explains a time more than this many times its own. The fixed part may, as operators differ in it, where the time is at
# most this many times as long
FAR, NEAR_FIXED = 4.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """The ceilings that one operator meets, by its device, dtype and kind of arithmetic.

    A rate is None where nothing was measured.
    """

    memory: str  # "HBM" or "DRAM"
    bytes_per_s: float
    cache: str = "cache"  # or "L2"
    cache_bytes_per_s: float | None = None
    arithmetic: str  # "tensor", "fp32", "fp64" or "int"
    flops_per_s: float
    special_per_s: float | None = None
    fixed_us: float = 0.0  # an operator of nothing: on a CPU its call, on a GPU the shortest kernel
    # the host's time for one launch; 0 where launches are queued ahead, on a CPU, and in a CUDA graph
    launch_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Least times of one call by unit, and what they say about it."""

    memory_us: float | None
    memory: str  # the unit
    compute_us: float | None
    compute: str  # the unit
    fixed_us: float
    bound: str | None  # None: something was not counted
    time_us: float | None  # the measured time of a call

    @property
    def roof_us(self) -> float | None:
        """The least time by the roof that is nearer; None if nothing was counted."""
        return max((us for us in (self.memory_us, self.compute_us) if us is not None), default=None)

    @property
    def roof(self) -> str | None:
        """The unit of the nearer roof."""
        if self.roof_us is None:
            return None
        return self.memory if self.memory_us == self.roof_us else self.compute

    @property
    def roof_share(self) -> float | None:
        """How much of its roof the call reaches: 1 is all of it."""
        return None if self.roof_us is None or not self.time_us else self.roof_us / self.time_us

    @property
    def unit(self) -> str | None:
        """The unit of the modelled bound."""
        return {"memory": self.memory, "compute": self.compute}.get(self.bound or "")


def model(operation: OperatorRow, roofs: Roofs, time_us: float | None = None) -> Model:
    """Returns the modelled times of one call.

    time_us: its measured time. A call that is faster than main memory allows found its data in the cache; one that is much
    slower than all of its roofs is bound by none of them: a short one by its fixed part, a long one by what the model does not
    know, such as a slow kernel.

    Example:
        >>> add = Operation(module="", op="aten::add", phase="forward", calls=1, flops=10**6, special=0, bytes=12 * 10**6,
        ...                 where="", dtype="fp32", device="cpu", key=(), indices=(0,))
        >>> model(add, Roofs(memory="DRAM", bytes_per_s=12e9, arithmetic="fp32", flops_per_s=1e11)).bound
        'memory'
    """
    memory, memory_us = roofs.memory, _us(operation.bytes, roofs.bytes_per_s)
    from_cache = memory_us is not None and time_us is not None and time_us < 0.9 * memory_us
    if from_cache and roofs.cache_bytes_per_s:
        memory, memory_us = roofs.cache, _us(operation.bytes, roofs.cache_bytes_per_s)
    arithmetic_us, special_us = _us(operation.flops, roofs.flops_per_s), _us(operation.special, roofs.special_per_s)
    uses_special = special_us is not None and special_us > (arithmetic_us or 0.0)
    compute_us = special_us if uses_special else arithmetic_us
    return Model(
        memory_us=memory_us,
        memory=memory,
        compute_us=compute_us,
        compute="special" if uses_special else roofs.arithmetic,
        fixed_us=roofs.fixed_us,
        bound=_bound(memory_us, compute_us, time_us, operation.device, roofs),
        time_us=time_us,
    )


def waiting(device: str, time_us: float, roofs: Roofs) -> str:
    """Returns the name for a call whose fixed part is over half of it: "overhead" or "latency".

    A CPU operator's fixed part is its call. On a GPU the fixed part is the kernel's own, unless the kernel ends before the host
    can launch the next.
    """
    return "overhead" if device == "cpu" or time_us <= roofs.launch_us else "latency"


def _bound(
    memory_us: float | None, compute_us: float | None, time_us: float | None, device: str, roofs: Roofs
) -> str | None:  # fmt: skip
    if memory_us is None or compute_us is None:
        return None
    nearer = max(memory_us, compute_us)
    expected_us = nearer + roofs.fixed_us
    if time_us is not None and time_us > max(FAR * expected_us, NEAR_FIXED * roofs.fixed_us):
        return None
    if roofs.fixed_us > nearer or (time_us is not None and time_us > FAR * expected_us):
        return waiting(device, time_us if time_us is not None else expected_us, roofs)
    if memory_us >= CLEAR * compute_us:
        return "memory"
    return "compute" if compute_us >= CLEAR * memory_us else "balanced"


def _us(count: int | None, rate_per_s: float | None) -> float | None:
    return None if count is None or not rate_per_s else count / rate_per_s * 1e6
