"""A simulated clock: experiments run their real calls, and each takes the time that a formula gives for it.

    time = max(FLOPs / rate, special functions / rate, bytes / bandwidth) + fixed

So the answers of experiments are known exactly, whatever else the machine does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from rooftile.diagnosis.counts import Counted, count
from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.intensity import ladder, references
from rooftile.diagnosis.experiments.intensity.references import References
from rooftile.diagnosis.verdicts.roofs import Roofs

# per µs, of a core as it might be
FLOPS = {torch.float32: 50e3, torch.float64: 25e3}
SPECIAL, DRAM_BYTES, CACHE_BYTES = 0.5e3, 10e3, 80e3
FIXED_US = 2.0


@dataclass(frozen=True, slots=True)
class Rung:
    """Stands for a kernel that Inductor would compile: a call with multiply-adds added to each element."""

    call: RepeatableCall
    count: int

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.call.on(tensors).run()


class SimulatedTimer:
    """Times by the formula; data is in the cache where a run is said to be warm, and fits."""

    cache_bytes = 1 << 16
    tried = 0, 64

    def __init__(self) -> None:
        # a call has its counts as long as it is held here
        self._known: dict[int, tuple[RepeatableCall, Counted]] = {}

    def once(self, call: RepeatableCall, *, cold: bool) -> float:
        flops, special, moved = self.counted(call)
        assert None not in (flops, special, moved)
        dtype = next((x.dtype for x in call.tensors if x.is_floating_point()), torch.float32)
        bandwidth = DRAM_BYTES if cold or moved > 2 * self.cache_bytes else CACHE_BYTES
        return max(flops / FLOPS[dtype], special / SPECIAL, moved / bandwidth) + FIXED_US

    def used(self, call: RepeatableCall, *, cold: bool = True) -> float:
        return self.once(call, cold=cold)

    def burst(self, call: RepeatableCall) -> float:
        return self.once(call, cold=False)

    def threads(self, call: RepeatableCall) -> float:
        return 1.0

    def counted(self, call: RepeatableCall) -> Counted:
        """Returns the FLOPs, special functions and bytes of one run."""
        if id(call) not in self._known:
            function, added = call.function, 0
            operator = call
            if isinstance(function, Rung):
                operator = function.call.on(call.tensors)
                added = function.count
            call.restore()
            result = operator.run()
            call.restore()
            made = count(operator.function, operator.args, operator.kwargs, result)
            elements = max(x.numel() for x in pytree.tree_leaves((result, call.tensors)) if isinstance(x, torch.Tensor))
            self._known[id(call)] = call, made._replace(flops=made.flops + 2 * added * elements)
        return self._known[id(call)][1]


class Simulated(NamedTuple):
    """The parts of the machine that a test needs."""

    timer: SimulatedTimer
    roofs: Roofs


def simulate(patch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> Simulated:
    """Returns the simulated machine's timer and ceilings; nothing is compiled, and the references are those of this machine."""
    patch.setattr(ladder, "_COMPILED", {})
    patch.setattr(ladder.Ladder, "_compiled", lambda self, added: Rung(self._call, added))
    # traffic and arithmetic overlap wholly
    patch.setattr(references, "_MEASURED", {str(references._path(dtype, torch.device("cpu"))): References(0.0, 1.0)})
    roofs = Roofs(
        memory="DRAM", bytes_per_s=DRAM_BYTES * 1e6, cache_bytes_per_s=CACHE_BYTES * 1e6,
        arithmetic="fp64" if dtype == torch.float64 else "fp32", flops_per_s=FLOPS[dtype] * 1e6, special_per_s=SPECIAL * 1e6,
        fixed_us=FIXED_US,
    )  # fmt: skip
    return Simulated(SimulatedTimer(), roofs)
