"""Counts the bytes that PyTorch's CPU allocator gives away and takes back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Change(NamedTuple):
    """One allocation, or with bytes below 0 one release."""

    bytes: int
    address: int


def changes(run: Callable[[], Any]) -> tuple[Any, list[Change]]:
    """Returns what a function returns, and its allocations and releases in their order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return result, [Change(event["args"]["Bytes"], event["args"]["Addr"]) for event in events]


def peak_bytes(run: Callable[[], Any]) -> int:
    """Returns the most bytes that a function holds at once, beside those that were there before."""
    now = peak = 0
    for change in changes(run)[1]:
        now += change.bytes
        peak = max(peak, now)
    return peak
