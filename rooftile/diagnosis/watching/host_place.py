"""Samples what the main thread does: the line of the script's own code, and the function of a library that it calls there."""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from types import FrameType
from typing import NamedTuple

from rooftile.diagnosis.watching.intervals import Interval
from rooftile.diagnosis.watching.where import is_of_torch, is_own, user_line

SAMPLE_SECONDS = 0.0005
# a place at which operators run as well is the way to these operators, and no work of its own
BESIDE_OPERATORS = 0.05
# the time between two operators of a program in Python: of a large library's forward
BETWEEN_NS = 250_000
# functions of the loader's own process, which wait for its workers
WORKERS = "_MultiProcessingDataLoaderIter"


class HostPlace(NamedTuple):
    """A place in the code at which the host spends time."""

    where: str = ""  # the user's line; "" unknown
    function: str = ""  # a library's, called there: "PIL.Image.Image.resize"; "" where the line itself runs
    loads: str = ""  # "here" inside of a DataLoader without workers, "workers" where it waits for its workers
    is_own: bool = False  # a line of the script itself, and no function that it calls

    @property
    def words(self) -> str:
        """Names the place in a sentence."""
        return f"{self.function}, called at {self.where}" if self.function else self.where


def place_in(frame: FrameType | None) -> HostPlace:
    """Returns the place of a thread whose innermost frame is given."""
    where, function, loads = user_line(frame), "", ""
    is_own_line = frame is not None and is_own(frame.f_code.co_filename)
    callee, found = None, False
    while frame is not None:
        code = frame.f_code
        if not found and is_own(code.co_filename):
            found = True
            if callee is not None and not is_of_torch(callee.f_code.co_filename):
                function = f"{callee.f_globals.get('__name__', '')}.{callee.f_code.co_qualname}"
            if function:
                where = user_line(frame)
        if code.co_qualname.startswith(WORKERS):
            loads = "workers"
        elif code.co_qualname.startswith("_SingleProcessDataLoaderIter"):
            loads = loads or "here"
        callee, frame = frame, frame.f_back
    return HostPlace(where, function, loads, is_own_line)


class HostSampler:
    """Samples the place of the thread that enters its block, from another thread; `seen` has times in ns, and places."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, HostPlace]] = []
        self._watched = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="rooftile-lines", daemon=True)

    def __enter__(self) -> HostSampler:
        # Python gives up its lock every 5 ms, or where C code lets go of it: samples would name only such code
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SAMPLE_SECONDS / 5)
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            frame = sys._current_frames().get(self._watched)
            if frame is not None:
                self.seen.append((time.time_ns(), place_in(frame)))


def work_of_the_host(
    seen: Sequence[tuple[int, HostPlace]], gaps: Sequence[Interval], operators: Sequence[Interval],
    asking: Collection[str] = (),
) -> dict[HostPlace, float]:  # fmt: skip
    """Returns the time in µs that the host spends on something else than operators, by place, longest first.

    Many gaps count as well as a long one: their samples share the time of all. In gaps that are as short as the time between two
    operators may be only the script's own lines count that ask for no operator: a sample cannot see a short operator, only what
    comes before and after it.

    Args:
        seen: the samples, in the order of time.
        gaps: in which the device has nothing to do because of the host; they do not overlap, and are sorted.
        operators: in which operators run on the host; likewise.
        asking: the lines that ask for operators.
    """
    long = [gap for gap in gaps if gap[1] - gap[0] > BETWEEN_NS]
    idle, busy = Counter[HostPlace](), Counter[HostPlace]()
    count = 0
    for at, place in seen:
        if _covers(gaps, at):
            count += 1
            idle[place] += (place.is_own and place.where not in asking) or _covers(long, at)
        elif _covers(operators, at):
            busy[place] += 1
    total_us = sum(end - start for start, end in gaps) / 1e3
    own = {
        place: number
        for place, number in idle.most_common()
        if number and place.where and busy[place] <= BESIDE_OPERATORS * number
    }
    return {place: total_us * number / count for place, number in own.items()}


def _covers(spans: Sequence[Interval], at: int) -> bool:
    n = bisect_right(spans, (at, sys.maxsize)) - 1
    return n >= 0 and spans[n][0] <= at <= spans[n][1]
