"""Lets a process of a server write down how many objects of the package it has, when it gets a signal."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

COUNTS = "ROOFTILE_TESTS_COUNTS"
SIGNAL = signal.SIGUSR1


def count_at_a_signal() -> None:
    """Writes the counts by class, with the tasks and threads, into a file that has the process's id as its name."""

    def write(*_: Any) -> None:
        gc.collect()
        found = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
        own = {name: count for name, count in found.items() if name.startswith(("rooftile.", "_asyncio.Task", "asyncio."))}
        file = Path(os.environ[COUNTS]) / f"{os.getpid()}.json"
        file.with_suffix(".new").write_text(json.dumps(own), encoding="utf-8")
        file.with_suffix(".new").replace(file)

    signal.signal(SIGNAL, write)
