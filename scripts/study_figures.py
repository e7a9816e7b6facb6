"""Draws the figures of the pages on recurrences, experts and user histories from committed lines, as the report page does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rooftile.drawing.page import Chart
from rooftile.drawing.svg import HEIGHT, WIDTH, svg, text
from rooftile_lab.bench.results import Row
from rooftile_lab.report import (
    context_section,
    experts_section,
    histories_pictures,
    histories_section,
    recall,
    recall_pictures,
    studies,
)
from rooftile_lab.report.recall_section import claim

GAP, TITLE, BELOW = 24, 30, 26


def states(results: Path) -> str:
    """Draws what a state of fixed size forgets, and what two layers of attention bring back."""
    found = recall.committed(results / "h200-recall.jsonl")
    assert found is not None
    drawn = recall_pictures.states(found)
    return beside_each_other(drawn[:2], claim(found), f"{found.machine[:1].upper()}{found.machine[1:]}: {found.problem}")


def contexts(results: Path) -> str:
    """Draws memory and time of writing against the length of the context."""
    rows = studies.committed(results / "h200-context.jsonl", "context")
    drawn = [context_section.context_chart(rows, *quantity) for quantity in context_section.QUANTITIES[:2]]
    short = [chart._replace(title=chart.title.partition(":")[0]) for chart in drawn if chart is not None]
    return beside_each_other(short, context_section.claim(rows), source(rows))


def loads(results: Path) -> str:
    """Draws the load of each expert by layer, with and without the balance loss."""
    rows = studies.committed(results / "h200-expert-training.jsonl", "expert-training")
    drawn = [experts_section.loads(row) for row in experts_section.by_kind(rows).values() if row.settings["loads"]]
    short = [chart._replace(title=" ".join(chart.title.split()[:4])) for chart in drawn]
    return beside_each_other(short, experts_section.claim(rows), source(rows))


def histories(results: Path) -> str:
    """Draws AUC, time and bytes against the number of events that a model reads."""
    rows = [row for row in studies.committed(results / "cpu-user-histories.jsonl", "user-histories") if row.measures]
    return beside_each_other(histories_pictures.pictures(rows), histories_section.claim(rows), source(rows))


def source(rows: Sequence[Row]) -> str:
    """The machine and the problem of rows, in words."""
    return f"{studies.machine_of(rows)}: {rows[0].problem}"


def beside_each_other(charts: Sequence[Chart], title: str, words: str) -> str:
    """Returns a picture of its own with charts beside each other, their titles above them, and words below."""
    pictures = [
        re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*)</svg>$', str(chart.picture), re.DOTALL) for chart in charts
    ]
    parts, height = [], max((float(found[2]) for found in pictures if found), default=float(HEIGHT))
    for n, (chart, found) in enumerate(zip(charts, pictures, strict=True)):
        assert found is not None
        x = GAP / 2 + n * (WIDTH + GAP)
        parts.append(text(x, 18, chart.title, "value", "start"))
        place = f'x="{x:g}" y="{TITLE}" width="{found[1]}" height="{found[2]}"'
        parts.append(f'<svg {place} viewBox="0 0 {found[1]} {found[2]}">{found[3]}</svg>')
    width, bottom = len(charts) * (WIDTH + GAP), TITLE + height + BELOW
    parts.append(text(GAP / 2, bottom - 8, words, "tick", "start"))
    style = (files("rooftile.drawing") / "picture.css").read_text(encoding="utf-8")
    # outlines of labels have the colour of the paper
    paper = f'<rect width="{width}" height="{bottom:g}" style="fill: var(--card)"/>'
    return svg(title, words, [f"<style>{style}</style>", paper, *parts], width, bottom) + "\n"
