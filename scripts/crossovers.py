"""The text of a page from rows of `rooftile bench approximate --crossover`: below which length to use exact attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rooftile.exact.masks import CAUSAL
from rooftile_lab.bench.methods.crossover import rounded
from rooftile_lab.bench.methods.table import WAYS
from rooftile_lab.bench.results import Row, latest

END = "-crossover"


class Cell(NamedTuple):
    """A search: its crossover, None where there is none, and the longest length."""

    at: float | None
    shortest: int
    longest: int

    def words(self) -> str:
        if self.at is None:
            return f"not below {self.longest:,}" if self.longest else "not measured"
        return f"{rounded(self.at):,}" if self.at > self.shortest else f"{self.shortest:,} or below"


def crossovers(rows: Iterable[Row]) -> str:
    """Returns Markdown: for each device a sentence and a table. Of several searches for one method the latest counts.

    Example:
        >>> crossovers([])
        'No crossover is measured yet.'
    """
    searches = [row for row in latest(rows) if row.suite == "approximate" and row.case.endswith(END)]
    devices = sorted({row.device for row in searches}, key=lambda device: (not _is_gpu(searches, device), device))
    if not devices:
        return "No crossover is measured yet."
    return "\n\n".join(_device([row for row in searches if row.device == device]) for device in devices)


def _is_gpu(rows: Sequence[Row], device: str) -> bool:
    return any(row.arch.startswith("sm") for row in rows if row.device == device)


def _device(rows: Sequence[Row]) -> str:
    cells: dict[str, dict[str, Cell]] = {}
    heads: dict[str, str] = {}
    for row in rows:
        name, numbers = row.case.removesuffix(END), row.measures
        cell = Cell(numbers.get("crossover_tokens"), int(numbers["shortest_tokens"]), int(numbers["longest_tokens"]))
        cells.setdefault(name, {})[row.phase] = cell
        heads[name] = f"{row.settings['heads']}, {row.settings['dim']}"
    lines = ["| method | query / key heads, head dim | forward, from tokens | backward, from tokens | decode, from tokens |"]
    lines.append("|---|---|--:|--:|--:|")
    for name, phases in cells.items():
        found = [phases[phase].words() if phase in phases else "–" for phase in ("fwd", "bwd", "decode")]
        lines.append(f"| `{name}` | {heads[name]} | {' | '.join(found)} |")
    first = max(rows, key=lambda row: row.date)
    threads = sorted({str(row.settings["threads"]) for row in rows if "threads" in row.settings})
    where = f"{first.device}, torch {first.torch}" + f", threads: {', '.join(threads)}" * bool(threads)
    return "\n".join([_advice(first.device, cells), "", *lines, "", f"{where}, {first.date[:10]}, commit {first.commit}."])


def _advice(device: str, cells: dict[str, dict[str, Cell]]) -> str:
    """The first sentences: the lengths below which no method is faster, forward and in a whole training step.

    Linformer, which has no causal form, is compared with attention without a mask, and has a sentence of its own.
    """
    forward = {name: phases["fwd"] for name, phases in cells.items() if "fwd" in phases}
    training = {name: Cell(*_later(phases)) for name, phases in cells.items() if {"fwd", "bwd"} <= phases.keys()}
    causal = [{name: cell for name, cell in each.items() if _is_causal(name)} for each in (forward, training)]
    words = [_below(causal[0], "a causal forward"), _below(causal[1], "causal training")]
    if len(causal[1]) < len(training):
        words.append(_below({name: cell for name, cell in training.items() if not _is_causal(name)}, "training without a mask"))
    return f"On {device}, " + " ".join([words[0], *(each[0].upper() + each[1:] for each in words[1:])])


def _is_causal(name: str) -> bool:
    return name not in WAYS or WAYS[name].mask == CAUSAL


def _later(phases: dict[str, Cell]) -> tuple[float | None, int, int]:
    """The length from which both phases are faster."""
    both = phases["fwd"], phases["bwd"]
    at = None if any(cell.at is None for cell in both) else max(cell.at or 0.0 for cell in both)
    return at, max(cell.shortest for cell in both), min(cell.longest for cell in both)


def _below(cells: dict[str, Cell], what: str) -> str:
    faster = {name: cell for name, cell in cells.items() if cell.at is not None}
    if not faster:
        longest = min((cell.longest for cell in cells.values()), default=0)
        return f"for {what} use `rt.attention`: no method is faster at the lengths measured, up to {longest:,} tokens at least."
    name = min(faster, key=lambda name: faster[name].at or 0.0)
    start = rounded(faster[name].at or 0.0)
    return f"for {what} below {start:,} tokens use `rt.attention`: `{name}` is the first that is faster."
