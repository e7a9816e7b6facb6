"""The section about long user histories: what it says and draws follows from the rows."""

from __future__ import annotations

import re
from dataclasses import replace

from rooftile_lab.bench import results, rows
from rooftile_lab.report import histories_pictures, histories_section
from rooftile_lab.report.studies import Study
from tests.bench.session import SESSION
from tests.report.test_report import Page

POSSIBLE = {64: 0.7, 256: 0.8, 1024: 1.0}


def clicked(method: str, n: int, auc: float, us: float, nbytes: float) -> results.Row:
    measures = {"length_events": n, "all_auc": auc, "far_auc": auc / 2, "possible_auc": POSSIBLE[n], "user_bytes": nbytes}
    return rows.timed_row(
        SESSION, [us], suite="user-histories", case=f"last-{n}", backend=method, phase="score", problem="64 candidates",
        measures=measures,
    )  # fmt: skip


# DIN reads all, SIM hard finds half, TWIN is the best; searches read less from 256 or 1,024 events on
ROWS = (
    *(clicked("din", n, POSSIBLE[n] - 0.01, 1.0 * n, 100.0 * n) for n in POSSIBLE),
    *(clicked("sim-hard", n, min(POSSIBLE[n], 0.8), 2.0 * n**0.5, 2e4) for n in POSSIBLE),
    *(clicked("twin", n, POSSIBLE[n], 10.0 * n, 4e4 + 10 * n) for n in POSSIBLE),
)


def test_the_title_compares_the_best_method_with_itself() -> None:
    due = "Reading 1,024 events of a user instead of 64, TWIN raises the AUC of clicks from 0.70 to 1.00, and takes 16× the time"
    assert histories_section.claim(ROWS) == due
    assert histories_section.claim(ROWS[:1]) == histories_section.claim(()) == "Long user histories"
    alike = [replace(row, measures=row.measures | {"all_auc": 0.6}) for row in ROWS]
    due = "In so few steps no model learns to gain from 1,024 events of a user instead of 64"
    assert histories_section.claim(alike) == due
    # another method is the best
    worse = (*ROWS[:-1], replace(ROWS[-1], measures=ROWS[-1].measures | {"all_auc": 0.5}))
    assert "DIN raises the AUC of clicks from 0.69 to 0.99" in histories_section.claim(worse)


def test_sentences_say_what_is_brought_and_what_it_costs() -> None:
    brought, cost, searched = histories_section.sentences(ROWS)
    assert brought == (
        "What it brings: the last 64 events allow an AUC of 0.70, the last 1,024 allow 1.00. All models come near that but "
        "SIM hard at 0.80."
    )
    assert cost == (
        "What it costs: with 16× the events a user takes 4.0× the time with SIM hard, and 16× with DIN. SIM hard is the "
        "fastest at 1,024 events."
    )
    assert searched == "SIM hard reads fewer bytes than the whole history has from 256 events on, TWIN from 1,024."
    none = [replace(row, measures=row.measures | {"user_bytes": 1e9}) if row.backend != "din" else row for row in ROWS]
    assert histories_section.sentences(none)[2].startswith("At none of these lengths")
    bad = [replace(row, measures=row.measures | {"all_auc": 0.6}) for row in ROWS]
    assert "No model comes near that: DIN at 0.60, SIM hard at 0.60 and TWIN at 0.60." in histories_section.sentences(bad)[0]


def test_a_part_has_three_pictures_and_a_table_with_every_method() -> None:
    failed = replace(clicked("eta", 64, 0, 0, 0), measures={}, median_us=None, reason="failed: no")
    (part,) = histories_section.section(Study(here=(*ROWS, failed), committed=()))["parts"]
    auc, time, nbytes = part["charts"]
    for chart in (auc, time, nbytes):
        picture = str(chart.picture)
        assert Page(picture).open == []
        assert set(re.findall(r'class="label \w+"[^>]*>([^<]+)<', picture)) == {"DIN", "SIM hard", "TWIN"}
    assert auc.table.rows[1] == ["256", "0.790", "0.800", "0.800", "0.800"]
    assert auc.table.head == ["events", "DIN", "SIM hard", "TWIN", "possible"]
    assert nbytes.table.rows[0][1:] == ["6.4\xa0kB", "20\xa0kB", "40.6\xa0kB"]
    ((title, table, _),) = part["tables"]
    assert title == "At 1,024 events"
    assert [row[0] for row in table.rows] == ["DIN", "SIM hard", "TWIN"]
    assert table.rows[1][1:3] == ["0.800", "0.400"]
    assert part["failed"] == ["ETA: failed: no"]
    # two lengths are too few for a line
    few = [row for row in ROWS if row.case != "last-64"]
    assert histories_pictures.pictures(few) == []


def test_a_higher_auc_is_higher_and_what_is_possible_lies_below() -> None:
    drawn = str(histories_pictures.pictures(ROWS)[0].picture)
    heights = {
        kind: [float(point.split(",")[1]) for point in points.split()]
        for kind, points in re.findall(r'<polyline class="line ([\w ]+)" points="([^"]+)"', drawn)
    }
    assert heights["due broad"] == heights["olive"]
    assert all(low > high for low, high in zip(heights["standard"], heights["olive"], strict=True))
    # the top of the axis, 1, and every mark are within the picture
    assert min(heights["olive"]) > 28
    assert max(heights["standard"]) < 270 - 38


def test_machines_have_parts_of_their_own() -> None:
    gpu = [replace(row, device="NVIDIA H100", arch="sm90") for row in ROWS]
    shown = histories_section.section(Study(here=ROWS, committed=(*ROWS, *gpu)))
    assert [part["title"] for part in shown["parts"]] == ["On one core", "On a GPU", "The same, small, on this machine"]
    alone = histories_section.section(Study(here=ROWS, committed=()))
    assert [part["title"] for part in alone["parts"]] == ["Small, on this machine"]
