"""A colour has one meaning on a page: blue is Rooftile, green what it is compared with, orange the plain way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rooftile
from rooftile.drawing.svg import marker
from rooftile_lab.report import approximate_section, diagnosis_section, figures, planned_picture
from rooftile_lab.report.comparison import OURS, SDPA, STANDARD
from rooftile_lab.report.planned import ROWS
from tests.report.test_report_approximate import FASTER, SLOWER, found
from tests.report.test_report_diagnosis import REPEATS

STYLE = (Path(rooftile.__file__).parent / "drawing" / "picture.css").read_text(encoding="utf-8")
MEANT = ("--ours", "--other", "--standard")


def test_bounds_and_causes_have_colours_of_their_own() -> None:
    colours = dict(re.findall(r"\.([\w-]+)(?:, \.[\w-]+)? \{ --kind: var\((--\w+)\); \}", STYLE))
    assert {"memory", "compute", "overhead", "latency", "balanced", "host", "communication"} <= colours.keys()
    assert [name for name, colour in colours.items() if colour in MEANT] == []
    assert "svg .roof.slanted { stroke: var(--violet); }" in STYLE


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_no_two_colours_are_the_same(scheme: int) -> None:
    values = re.findall(r"--(ours|other|standard|violet|gold|grey|rose|olive|brown|tan|mauve): (#\w+)", STYLE)
    half = values[scheme * len(values) // 2 : (scheme + 1) * len(values) // 2]
    assert len({name for name, _ in half}) == len({value for _, value in half}) == 11


def kinds(picture: str) -> dict[str, str]:
    """Returns the kinds of a picture's lines by their names in the legend."""
    return {name: kind for kind, name in re.findall(r'<text class="label (\w+)"[^>]*>([^<]+)<', picture)}


def test_what_is_compared_with_is_green_and_ours_blue() -> None:
    assert figures.KINDS == {OURS: "ours", SDPA: "other", STANDARD: "standard"}
    (chart,) = approximate_section.section(found(linear=FASTER, nsa=SLOWER))["charts"]
    assert kinds(str(chart.picture)) == {"exact": "other", "linear": "ours"}
    # what a model expects was not measured, and is grey
    assert kinds(str(diagnosis_section.repeats_chart(REPEATS).picture)) == {"measured": "ours", "by the ceilings": "due"}
    # numbers of rows are neither ours nor theirs
    assert {planned_picture.KINDS[rows] for rows in ROWS}.isdisjoint({"ours", "other", "standard"})


@pytest.mark.parametrize("kind", ["ours", "standard", "other", "third", "rose", "gold", "olive", "mauve", "due"])
def test_every_kind_of_line_has_a_marker_and_a_colour(kind: str) -> None:
    assert f'class="mark {kind}"' in marker(kind, (1.0, 2.0), "x")
    for part in ("line", "mark", "label"):
        assert re.search(rf"svg \.{part}\.{kind}\b", STYLE), part
