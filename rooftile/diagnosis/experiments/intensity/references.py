"""The two references that a slope is read against: an addition is 0 and 256 multiply-adds are 1.

Both are measured as any operator is, so the caches and clocks of this machine are in both. They are measured once per dtype,
which takes half a minute, and kept beside the ceilings.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.intensity.ladder import Ladder
from rooftile.diagnosis.experiments.intensity.multiply_adds import operator
from rooftile.diagnosis.experiments.intensity.sweep import sweep
from rooftile.diagnosis.experiments.smaller.axes import axes
from rooftile.diagnosis.experiments.timing import Timer, last_level_bytes
from rooftile.errors import Unsupported
from rooftile.hardware.ceilings import cache_directory
from rooftile.hardware.device import describe

MULTIPLY_ADDS = 256
# numbers of the second reference: enough to fill all cores, few enough to be short
SMALL = 1 << 21
# two references that are nearer than this say nothing
DISTINCT = 0.3
# seconds to compile and measure both
NEEDED_S = {"cpu": 25.0, "cuda": 15.0}


@dataclass(frozen=True, slots=True)
class References:
    """The slopes of the two references on this machine, in one dtype."""

    addition: float
    multiply_adds: float

    def read(self, slope: float) -> float:
        """Returns a slope between the two: 0 is the slope of an addition, 1 of 256 multiply-adds.

        Example:
            >>> References(0.2, 1.0).read(0.6)
            0.5
        """
        return round((slope - self.addition) / (self.multiply_adds - self.addition), 6)


_MEASURED: dict[str, References] = {}
# reasons why they cannot be measured here, so that no operator waits for a second try
_REFUSED: dict[str, str] = {}


def references(dtype: torch.dtype, timer: Timer, device: torch.device, deadline: Deadline | None = None) -> References:
    """Returns the references, measured now or before.

    deadline: None, and they may take as long as they need.

    Raises Unsupported where they cannot be told apart or compiled, or not in time.
    """
    path = _path(dtype, device)
    if str(path) in _REFUSED:
        raise Unsupported(_REFUSED[str(path)])
    if str(path) not in _MEASURED:
        if path.exists():
            found = References(**json.loads(path.read_text()))
        else:
            needed_s = NEEDED_S[device.type]
            if not (deadline or Deadline()).allows(needed_s):
                raise Unsupported(f"its scale is measured first, once per dtype, which takes {needed_s:.0f} s of the budget")
            try:
                found = _measure(dtype, timer, device)
            except Unsupported as reason:
                _REFUSED[str(path)] = str(reason)
                raise
            _keep(path, found)
        _MEASURED[str(path)] = found
    return _MEASURED[str(path)]


def prepare(
    dtypes: Iterable[torch.dtype], timer: Timer, device: torch.device, say: Callable[[str], None] = lambda words: None
) -> None:  # fmt: skip
    """Measures the references of dtypes that have none on this machine; they are kept, as the ceilings are.

    A dtype without references has its reason beside each operator that asks for them. say: is called with words about each dtype.
    """
    for dtype in dtypes:
        path = _path(dtype, device)
        if not path.exists() and str(path) not in _REFUSED | _MEASURED:
            say(f"measuring once how arithmetic in {str(dtype).removeprefix('torch.')} hides behind memory")
        with suppress(Unsupported):
            references(dtype, timer, device)


def _measure(dtype: torch.dtype, timer: Timer, device: torch.device) -> References:
    size = 8 * timer.cache_bytes if device.type == "cuda" else 2 * last_level_bytes()
    # between 1/2 and 1, as random numbers of any program are: zeros take less power
    many = (0.5 + 0.5 * torch.rand(size // dtype.itemsize, device=device)).to(dtype)
    few = many if device.type == "cuda" else many[:SMALL].clone()
    addition = RepeatableCall(torch.ops.aten.add.Tensor, (many, 0.25))
    chain = RepeatableCall(operator(), (few, MULTIPLY_ADDS))
    flat = _slope(addition, timer, ())
    steep = _slope(chain, timer, (MULTIPLY_ADDS // 2, MULTIPLY_ADDS // 4))
    if steep - flat < DISTINCT:
        raise Unsupported(
            f"an addition has slope {flat:.2f} here and 256 multiply-adds {steep:.2f}, which are no scale for others: the "
            "machine may be busy with something else"
        )
    return References(round(flat, 4), round(steep, 4))


def _slope(call: RepeatableCall, timer: Timer, counts: tuple[int, ...]) -> float:
    ladder = Ladder(call)
    # the operator itself runs in many kernels outside of a compiler, so its own time is the time of its first rung
    own = ladder.rung(0)
    # on a machine that has never compiled, the first kernel alone may take longer than all the others
    deadline = Deadline(NEEDED_S[call.device.type])
    time_us = median(timer.once(own, cold=True) for _ in range(5))
    found = sweep(ladder, call, axes(call), timer, time_us, deadline, steps=(1 / 2, 1 / 4), counts=counts)
    if found.slope is None:
        raise Unsupported("the references' times were too uneven for a slope")
    return found.slope


def _path(dtype: torch.dtype, device: torch.device) -> Path:
    here = describe(device)
    threads = str(torch.get_num_threads()) if device.type == "cpu" else ""
    words = [here.name, here.uuid, here.torch, here.triton, threads, str(dtype)]
    return cache_directory() / f"references-{hashlib.sha256('|'.join(words).encode()).hexdigest()[:16]}.json"


def _keep(path: Path, found: References) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # replace atomically: a concurrent reader sees the old file or the new one
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(found)) + "\n")
        unfinished.replace(path)
    except OSError as error:
        warnings.warn(f"could not store the references of the intensity sweep: {error}", stacklevel=3)
