"""The options that all scripts here share, and the times of their steps, which a script prints at its end as a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import mean, median
from typing import Any

import torch

WARM_UPS = 3
SIZES = ("toy", "real", "tiny")


class Course:
    """The steps of a script.

    Every script takes --size: "toy" for a CPU, "real" as the public program is, and "tiny" with as many operators as "toy" and
    next to no data, so that only the fixed costs are left. --without leaves a part of the program out.

    Args:
        parts: the words that --without takes.
        options: further options of the script, by name, with their defaults; a default of False makes a flag.
    """

    def __init__(self, *parts: str, **options: Any) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", choices=SIZES, default="toy")
        parser.add_argument("--steps", type=int, default=24)
        parser.add_argument("--counted", action="store_true", help="show one step to Nsight Compute, and end")
        parser.add_argument("--without", choices=("", *parts), default="")
        for name, default in options.items():
            flag = "--" + name.replace("_", "-")
            if default is False:
                parser.add_argument(flag, action="store_true")
            else:
                parser.add_argument(flag, type=type(default), default=default)
        self.options = parser.parse_args()
        self.size: str = self.options.size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._wall: list[float] = []
        self._own: list[float] = []
        torch.manual_seed(0)

    def sized(self, toy: Any, real: Any, tiny: Any) -> Any:
        """Returns the value for the size that was asked for."""
        return {"toy": toy, "real": real, "tiny": tiny}[self.size]

    def has(self, part: str) -> bool:
        """Returns whether a part of the program was not left out."""
        return bool(self.options.without != part)

    def goes_on(self) -> bool:
        """Takes the time, and returns whether another step is due; prints the times if none is."""
        if self.options.counted:
            return self._shows_one()
        if self.device.type == "cuda" and len(self._wall) in (WARM_UPS, self.options.steps):
            torch.cuda.synchronize()
        self._wall.append(time.perf_counter())
        self._own.append(time.process_time())
        if len(self._wall) <= self.options.steps:
            return True
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps({"wall_us": self._us(self._wall), "cpu_us": self._us(self._own)}), flush=True)
        return False

    def _shows_one(self) -> bool:
        """Begins to show the step after the first three to a profiler, and ends with it."""
        self._wall.append(0.0)
        if len(self._wall) <= WARM_UPS:
            return True
        torch.cuda.synchronize()
        if len(self._wall) == WARM_UPS + 1:
            torch.cuda.cudart().cudaProfilerStart()
            return True
        torch.cuda.cudart().cudaProfilerStop()
        return False

    def _us(self, ticks: list[float]) -> float:
        first = min(WARM_UPS, len(ticks) - 2)
        steps = [end - start for start, end in zip(ticks[first:], ticks[first + 1 :], strict=False)]
        # a GPU runs steps after the host has asked for them
        return 1e6 * (mean(steps) if self.device.type == "cuda" else median(steps))
