"""Reads a trace of torch.profiler, and says in one sentence what a file is that is none."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rooftile.diagnosis.recorded.event import CATEGORIES, TraceEvent
from rooftile.errors import InvalidInput

RECORD = "record one with torch.profiler's export_chrome_trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrace:
    """The events of a trace, and what it says of itself."""

    name: str  # the file's, without its folder
    events: Sequence[TraceEvent]
    devices: Sequence[dict[str, Any]]  # its GPUs
    host: str  # the name of the machine; "" unknown
    rank: str  # "rank 3 of 8 (nccl)"; "" where it was a single process


def read_trace(path: str | Path) -> RecordedTrace:
    """Reads a Chrome trace that torch.profiler wrote, packed by gzip or not.

    Raises:
        InvalidInput: there is no such file, it ends too early, it is no JSON, another program wrote it, or it has no operators.
    """
    path = Path(path)
    found = _parse(path, _bytes_of(path))
    values = found if isinstance(found, dict) else {"traceEvents": found}
    events = values.get("traceEvents")
    if not isinstance(events, list):
        raise InvalidInput(f"{path} has no traceEvents, so it is no Chrome trace; {RECORD}")
    kept = [event for event in events if isinstance(event, TraceEvent)]
    _check(path, kept, is_torchs="deviceProperties" in values or "schemaVersion" in values)
    devices = values.get("deviceProperties")
    return RecordedTrace(
        name=path.name, events=kept,
        devices=[device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else [],
        host=str(values.get("host_name") or ""), rank=_rank(values.get("distributedInfo")),
    )  # fmt: skip


def _bytes_of(path: Path) -> bytes:
    if not path.exists():
        raise InvalidInput(f"{path} is not there; give the path of a trace that torch.profiler wrote")
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder; give the path of one trace in it")
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read ({error.strerror}); give a trace that this user may read") from None
    if not packed.startswith(b"\x1f\x8b"):
        return packed
    try:
        return gzip.decompress(packed)
    except EOFError:
        _cut_off(path)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInput(f"{path} begins as gzip and is none ({error}); {RECORD}") from None


def _parse(path: Path, written: bytes) -> Any:
    if not written.strip():
        raise InvalidInput(f"{path} is empty; {RECORD}")
    try:
        text = written.decode()
        # events become small objects while they are read: as dictionaries they would take several times the file's size
        return json.loads(text, object_hook=_event)
    except json.JSONDecodeError as error:
        whole = text.rstrip()
        if whole[:1] in ("{", "[") and (whole[-1] not in "}]" or error.pos >= len(whole)):
            _cut_off(path)
        raise InvalidInput(f"{path} is not JSON ({error.msg} in line {error.lineno}); {RECORD}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not JSON, as it is no text; {RECORD}") from None
    except RecursionError:
        raise InvalidInput(f"{path} has brackets in brackets without end, as no trace has; {RECORD}") from None


def _event(found: dict[str, Any]) -> Any:
    """Makes an event of an object that is one; None for events that a diagnosis does not read."""
    if "ph" not in found:
        return found
    category = found.get("cat")
    kept = CATEGORIES.get(category) if found["ph"] == "X" and isinstance(category, str) else None
    return None if kept is None else TraceEvent(found, kept)


def _check(path: Path, events: Sequence[TraceEvent], *, is_torchs: bool) -> None:
    if any(event.category == "cpu_op" for event in events):
        return
    if any(event.on_device for event in events):
        raise InvalidInput(f"{path} has kernels and no operators; record it with ProfilerActivity.CPU, too")
    if is_torchs:
        raise InvalidInput(f"{path} has no operator in it; record it with ProfilerActivity.CPU, around the steps of a program")
    raise InvalidInput(f"{path} is a Chrome trace of another program than torch.profiler; {RECORD}")


def _rank(found: Any) -> str:
    if not isinstance(found, dict) or not isinstance(found.get("world_size"), int) or found["world_size"] < 2:
        return ""
    return f"rank {found.get('rank')} of {found['world_size']} ({found.get('backend')})"


def _cut_off(path: Path) -> NoReturn:
    raise InvalidInput(f"{path} ends in the middle, as a copy that was broken off does; copy it again, or record it again")
