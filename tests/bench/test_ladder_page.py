"""The page of the ladder says what its results say."""

from __future__ import annotations

from rooftile_lab.bench import results
from rooftile_lab.bench.ladder import RUNGS
from rooftile_lab.bench.results import Row
from scripts import write_ladder as page


def test_page_and_figure_are_what_the_results_make_them() -> None:
    times = page.read(page.TIMES)
    assert page.PAGE.read_text() == page.page(times, page.read(page.COUNTERS)), "`make tables` writes it"
    assert page.FIGURE.read_text() == page.figure(times), "`make tables` writes it"


def test_every_rung_has_a_name_for_its_limit() -> None:
    assert set(page.RUNG) == set(RUNGS)


def test_a_later_line_of_a_rung_counts(tmp_path) -> None:
    about = {"device": "d", "commit": "c", "date": "2026-01-01"}
    rows = [Row(suite="ladder", case="d128-full-4k", backend="plain", phase="fwd", median_us=us, **about) for us in (1.0, 2.0)]
    path = tmp_path / "times.jsonl"
    results.append(path, [row.json() for row in rows])
    assert page.read(path) == {("plain", "full"): rows[1]}
