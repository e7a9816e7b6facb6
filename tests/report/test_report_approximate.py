"""The page's section on approximate attention: its titles follow from its numbers, and its pictures from pairs."""

from __future__ import annotations

import json

import pytest
import torch

from rooftile.drawing import charts
from rooftile.drawing.charts import Series
from rooftile.exact.masks import CAUSAL
from rooftile_lab.bench.methods.crossover import Found, Point
from rooftile_lab.bench.methods.losses import Loss
from rooftile_lab.bench.methods.way import Sizes
from rooftile_lab.report import approximate, approximate_section, experiments, machine, page
from rooftile_lab.report.approximate import Approximate
from rooftile_lab.report.plan import plan_for
from rooftile_lab.report.sight import OWN, STRIDE, sight, sights
from rooftile_lab.report.tiles import aligned_walk

FASTER = Found((Point(256, 4e3, 1e3), Point(512, 4e3, 4e3), Point(1024, 4e3, 16e3)), 512.0, "the limit")
SLOWER = Found((Point(256, 9e3, 1e3), Point(512, 12e3, 4e3)), None, "the time budget")


def found(**paying: Found) -> Approximate:
    lost = [Loss(method="exact", gaussian=1e-7, found=(1.0, 1.0))]
    lost += [Loss(method=name, gaussian=0.5, found=(0.0, 0.5)) for name in paying]
    sizes = {name: Sizes(1, 1, 4, 4, 64) for name in paying}
    return Approximate(paying=paying, sizes=sizes, losses=lost, lost_at=64, sights=sights(128), dtype="fp32")


@pytest.mark.parametrize(
    ("paying", "due"),
    [
        (
            {"linear": FASTER, "nsa": SLOWER},
            "1 of 2 approximate methods become faster than exact attention here, the first (linear) from 510 tokens",
        ),
        ({"linear": SLOWER, "nsa": SLOWER}, "Up to 512 tokens, no approximate method is faster than exact attention here"),
    ],
)
def test_the_claim_follows_the_numbers_also_where_they_are_against_the_methods(paying, due) -> None:
    assert approximate_section.claim(found(**paying)) == due


def test_a_methods_title_names_its_crossover_or_how_much_slower_it_is() -> None:
    assert approximate_section.title("linear", FASTER) == "linear: faster from 510 tokens, 4.0× at 1,024"
    assert approximate_section.title("nsa", SLOWER) == "nsa: not faster up to 512 tokens, where it takes 3.0× the time"
    nothing = Found((), None, "out of memory at 256")
    assert approximate_section.title("nsa", nothing) == "nsa: not measured (out of memory at 256)"


def test_the_page_has_the_section_with_a_mark_where_the_lines_cross() -> None:
    both = found(linear=FASTER, nsa=SLOWER)
    plan, command = plan_for("cpu", quick=True), machine.reproduction("rooftile report")
    report = experiments.Report(plan=plan, reproduction=command, approximate=both)
    text = page.render(report)
    assert "linear: faster from 510 tokens, 4.0× at 1,024" in text
    assert "Untrained, it finds 25\xa0% of the needles; error 0.50." in text
    section = text[text.index('<section id="approximate">') :]
    section = section[: section.index("</section>")]
    # one method crosses, the other never does
    assert section.count('class="bracket"') == 1
    assert "strided, by column" in section
    numbers = json.loads(json.dumps(report.json()))["approximate"]
    assert numbers["paying"]["linear"]["at"] == 512
    assert numbers["losses"][2]["found"] == [0.0, 0.5]


def test_a_mark_stands_between_its_neighbours() -> None:
    line = Series(name="exact", kind="other", points=((256.0, 1.0), (1024.0, 4.0)))
    picture = charts.log_chart([line], title="t", y_name="time", write=str, mark=512.0)
    place = float(picture.split('class="bracket" d="M ')[1].split()[0])
    ends = [float(part.split(",")[0]) for part in picture.split('points="')[1].split('"')[0].split()]
    assert place == pytest.approx(sum(ends) / 2, abs=0.2)
    assert ">512<" in picture


def test_tiles_of_a_causal_table_are_those_of_the_causal_mask() -> None:
    i, j = torch.arange(64)[:, None], torch.arange(64)
    seen = sight("causal", "", j <= i, 16)
    assert set(seen.visits) == set(aligned_walk(CAUSAL, 64, 16, 16))
    assert seen.pairs == 64 * 65 // 2
    assert seen.computed == 10 / 16
    assert sight("none", "", torch.zeros(64, 64, dtype=torch.bool), 16).filled == 0.0


def test_arranged_tokens_fill_their_tiles() -> None:
    by_name = {each.name: each for each in sights(512)}
    for scattered, arranged in (("reformer", "reformer, sorted"), ("routing", "routing, sorted")):
        assert by_name[scattered].pairs == by_name[arranged].pairs
        assert by_name[scattered].computed > 2 * by_name[arranged].computed
    # a column of 32 tokens is two tiles, so three tiles of a column are computed: the causal half
    columns = by_name["strided, by column"]
    assert len(columns.visits) == 3 * STRIDE
    assert columns.pairs == STRIDE * 32 * 33 // 2
    assert by_name["linformer"].computed == by_name["linformer"].filled == 1
    # pages are read whole, a quarter of them
    assert by_name["loki"].filled == 1
    tiles = [visit for visit in by_name["loki"].visits if visit.t == 512 - 16]
    assert len(tiles) == 512 // 16 // 4
    # the last query of the fixed set sees its block and the summaries of all others, in a tile each
    last = [visit for visit in by_name["fixed"].visits if visit.t == 512 - 16]
    assert len(last) == OWN // 16 + 512 // OWN - 1


def test_the_experiment_measures_every_method_and_says_each_step() -> None:
    said = []
    plan = plan_for("cpu", quick=True)
    made = approximate.measure(plan, "cpu", lambda done, words: said.append((done, words)))
    assert list(made.paying) == list(approximate.WHOLE)
    assert {search.longest for search in made.paying.values()} == {256}
    assert [loss.method for loss in made.losses] == ["exact", *approximate.WHOLE]
    assert made.loss_of("exact").recall == 1
    assert all(0 <= done <= 1 for done, _ in said)
    assert [done for done, _ in said] == sorted(done for done, _ in said)


def test_a_method_that_is_faster_within_the_spread_is_not_called_faster() -> None:
    close = Found((Point(256, 4e3, 1e3), Point(512, 4e3, 3.9e3), Point(1024, 7e3, 8e3)), 700.0, "the limit")
    assert approximate_section.claim(found(linear=close)).startswith("1 of 1 approximate methods become faster")
    assert approximate_section.title("linear", close, 0.01).startswith("linear: faster from ")
    # a time lies within 10 % of its median as often as not
    assert approximate_section.claim(found(linear=close), 0.1).startswith("Up to 1,024 tokens, no approximate method is faster")
    assert approximate_section.title("linear", close, 0.1) == "linear: as fast at 1,024 tokens"


def test_a_method_with_fewer_than_three_lengths_has_a_sentence_in_place_of_a_chart() -> None:
    shown = approximate_section.section(found(linear=FASTER, nsa=SLOWER))
    assert [chart.title for chart in shown["charts"]] == ["linear: faster from 510 tokens, 4.0× at 1,024"]
    assert shown["short"] == ["nsa: not faster up to 512 tokens, where it takes 3.0× the time."]
