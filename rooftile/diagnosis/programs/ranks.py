"""A program that torchrun has launched: each process diagnoses its own step, and rank 0 joins what they found."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.output.units import duration, percent

FORM = "rooftile.diagnosis.ranks/1"
# ranks end their experiments at different times
PATIENCE_SECONDS = 120.0
# ranks that wait for each other differ by noise only
ALIKE = 1.05


class Rank(NamedTuple):
    """The rank of this process among the processes of the program."""

    number: int
    world: int

    @classmethod
    def here(cls) -> Rank:
        """Reads it from the environment, where torchrun writes it; rank 0 of 1 without torchrun."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def file_of(rank: int, path: Path) -> Path:
    """The file of one rank: step.json becomes step-rank3.json."""
    return path.with_stem(f"{path.stem}-rank{rank}")


def forget(path: Path) -> None:
    """Deletes what an earlier run of this rank wrote, which rank 0 would take for this one's."""
    if (rank := Rank.here()).world > 1:
        file_of(rank.number, path).unlink(missing_ok=True)


def write(found: Diagnosis, rank: Rank, path: Path, patience: float = PATIENCE_SECONDS) -> str:
    """Writes this rank's diagnosis to its own file; rank 0 waits for the others, and writes all of them to `path`.

    Returns a table with a line for each rank; "" on other ranks than 0.
    """
    own = file_of(rank.number, path)
    # a file that is there is whole
    half = own.with_suffix(".part")
    half.write_text(found.to_json() + "\n")
    half.replace(own)
    if rank.number:
        return ""
    end = time.monotonic() + patience
    files = [file_of(number, path) for number in range(rank.world)]
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.2)
    ranks = [json.loads(file.read_text()) if file.exists() else None for file in files]
    path.write_text(json.dumps({"form": FORM, "ranks": ranks}, indent=2) + "\n")
    return table(ranks)


def table(ranks: Sequence[dict[str, Any] | None]) -> str:
    """Returns a line for each rank: the time of its step, the part that is overhead, and what bounds it."""
    lines = ["rank       step  overhead  bound"]
    for number, found in enumerate(ranks):
        if found is None:
            lines.append(f"{number:4}  no diagnosis: the process ended, or took longer than the others by two minutes")
            continue
        step = found["step"]
        words = f"{duration(step['time_us']):>9}  {percent(step['overhead_share']):>8}  {step['bound'] or 'unknown'}"
        lines.append(f"{number:4}  {words}")
    times = [found["step"]["time_us"] for found in ranks if found is not None]
    if len(times) > 1:
        if max(times) < ALIKE * min(times):
            return "\n".join([*lines, f"all take the same time within {percent(ALIKE - 1)}"])
        slowest = next(n for n, found in enumerate(ranks) if found is not None and found["step"]["time_us"] == max(times))
        lines.append(f"rank {slowest} is the slowest, by {percent(max(times) / min(times) - 1)} of the fastest one's step")
    return "\n".join(lines)
