"""The section of the page about long user histories: what more events of a user bring, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rooftile.drawing.page import Table
from rooftile.drawing.units import duration, size, times
from rooftile_lab.bench.results import Row
from rooftile_lab.report.histories_pictures import NAMES, auc_of, by_length, bytes_of, pictures, possible, time_of
from rooftile_lab.report.studies import Study, machine_of

# AUC that two trainings of one model differ by
SURE = 0.03


def section(study: Study) -> dict[str, Any]:
    """Returns the section's words and charts."""
    committed = [
        (f"On {'one core' if one[0].arch == 'cpu' else 'a GPU'}", one) for one in _machines(study.committed) if _timed(one)
    ]
    here = ("The same, small, on this machine" if committed else "Small, on this machine", list(study.here))
    return {
        "claim": claim(committed[0][1] if committed else study.here),
        "setup": (
            "A recommender reads what a user did before. Six small models learn which of the shown items users click. Each click "
            "comes from an interest that lies a known number of events back, so it is known which AUC the last n events allow: the "
            "grey band. DIN weighs all n events for each item, HSTU lets the events read each other first, and SIM, ETA and TWIN "
            "search the n events for a few that the item needs. All run on rooftile.recommend."
        ),
        "parts": [_part(title, rows) for title, rows in [*committed, here]],
        "note": (
            "Time holds embedding and projecting the whole history, and for HSTU its layer over all events, which a server would "
            "keep. Bytes are counted, for keys and values that are kept: HSTU reads as many as DIN. There is one training of each, so "
            f"AUC that differ by less than {SURE} are called equal. rooftile bench user-histories repeats the study."
        ),
    }  # fmt: skip


def claim(rows: Sequence[Row]) -> str:
    """Returns the section's title: the best AUC at the longest history beside the same method's at the shortest, and its time."""
    rows = _timed(rows)
    if len(possible(rows)) < 2:
        return "Long user histories"
    n, N = min(possible(rows)), max(possible(rows))
    best = max(_found(rows, N), key=lambda name: by_length(rows, name, auc_of)[N])
    auc, us = by_length(rows, best, auc_of), by_length(rows, best, time_of)
    if n not in auc:
        return "Long user histories"
    if auc[N] - auc[n] < SURE:
        return f"In so few steps no model learns to gain from {N:,} events of a user instead of {n:,}"
    return (
        f"Reading {N:,} events of a user instead of {n:,}, {NAMES[best]} raises the AUC of clicks from {auc[n]:.2f} to {auc[N]:.2f}, "
        f"and takes {times(us[N] / us[n])} the time"
    )


def sentences(rows: Sequence[Row]) -> list[str]:
    """Says what a longer history brings and costs, and where a search pays."""
    n, N = min(possible(rows)), max(possible(rows))
    found = _found(rows, N)
    if n == N or not found:
        return []
    auc = {name: by_length(rows, name, auc_of)[N] for name in found}
    behind = [name for name in found if possible(rows)[N] - auc[name] > SURE]
    reached = "All models come near that" if len(behind) < len(found) else "No model comes near that"
    short = [f"{NAMES[name]} at {auc[name]:.2f}" for name in behind]
    words = [
        f"What it brings: the last {n:,} events allow an AUC of {possible(rows)[n]:.2f}, the last {N:,} allow "
        f"{possible(rows)[N]:.2f}. {reached}"
        + f"{' but ' if len(behind) < len(found) else ': '}{_listed(short)}" * bool(behind)
        + "."
    ]
    grown = {name: us[N] / us[n] for name in found if n in (us := by_length(rows, name, time_of)) and us[n]}
    if grown:
        least, most = min(grown, key=grown.__getitem__), max(grown, key=grown.__getitem__)
        fastest = min(found, key=lambda name: by_length(rows, name, time_of)[N])
        words.append(
            f"What it costs: with {times(N / n)} the events a user takes {times(grown[least])} the time with {NAMES[least]}, and "
            f"{times(grown[most])} with {NAMES[most]}. {NAMES[fastest]} is the fastest at {N:,} events."
        )
    return words + _searches(rows)


def _searches(rows: Sequence[Row]) -> list[str]:
    """Says from which length on searches read fewer bytes than the whole history has."""
    whole = by_length(rows, "din", bytes_of)
    if not whole:
        return []
    names: dict[int, list[str]] = {}
    for name in NAMES:
        found = by_length(rows, name, bytes_of)
        less = [n for n in found if n in whole and found[n] < whole[n]]
        if less:
            names.setdefault(min(less), []).append(NAMES[name])
    if not names:
        return ["At none of these lengths a search reads fewer bytes than the whole history has."]
    (first, some), *others = sorted(names.items())
    more = "".join(f", {_listed(some)} from {n:,}" for n, some in others)
    verb = "read" if len(some) > 1 else "reads"
    return [f"{_listed(some)} {verb} fewer bytes than the whole history has from {first:,} events on{more}."]


def _listed(words: Any) -> str:
    words = list(words)
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.measures and row.median_us]


def _found(rows: Sequence[Row], length: int) -> list[str]:
    """The methods that have a row for a length."""
    return [name for name in NAMES if length in by_length(rows, name, auc_of)]


def _machines(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each machine."""
    return [list(some) for _, some in groupby(sorted(rows, key=lambda row: row.device), key=lambda row: row.device)]


def _part(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    timed = _timed(rows)
    return {
        "title": title,
        "note": f"{machine_of(timed)}: {timed[0].problem}." if timed else "",
        "failed": [f"{NAMES.get(row.backend, row.backend)}: {row.reason}" for row in rows if row.reason],
        "charts": pictures(timed),
        "sentences": sentences(timed) if timed else [],
        "tables": [_table(timed)] if timed else [],
    }


def _table(rows: Sequence[Row]) -> tuple[str, Table, str]:
    """The title and the numbers of all methods at the longest history, and a caption."""
    N = max(possible(rows))
    last = {row.backend: row for row in rows if row.measures["length_events"] == N}
    cells = [
        [
            NAMES[name], f"{auc_of(row):.3f}", f"{row.measures['far_auc']:.3f}" if "far_auc" in row.measures else "–",
            duration(time_of(row)), size(bytes_of(row)),
        ]
        for name in NAMES
        if (row := last.get(name))
    ]  # fmt: skip
    head = ["", "AUC", "of the oldest", "time", "bytes"]
    note = (
        "Of the oldest: AUC of clicks whose interests lie in the oldest three quarters of the history. For an item SIM soft reads the "
        "events with the nearest embeddings, SIM hard the latest events of its category, ETA the events with the nearest hashes, and "
        "TWIN, in each head, the events with the largest scores."
    )
    return f"At {N:,} events", Table(head, cells), note
