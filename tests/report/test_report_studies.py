"""The sections about context and experts: what they say and draw follows from the rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rooftile.drawing import charts
from rooftile.drawing.heat_map import heat_map
from rooftile_lab.bench import results, rows
from rooftile_lab.report import context_section, experts_section, studies
from rooftile_lab.report.studies import Study
from tests.bench.session import SESSION
from tests.report.test_report import Page


def served(model: str, context: int, nbytes: float, us: float) -> results.Row:
    measures = {"context_tokens": context, "sequence_bytes": nbytes, "write_us": us}
    return rows.timed_row(
        SESSION,
        [us],
        suite="context",
        case=f"context-{context}",
        backend=model,
        phase="write",
        problem="12 layers",
        measures=measures,
    )


CONTEXT = (
    *(served("attention", n, 1000.0 * n, 1.0 * n) for n in (100, 200, 400)),
    *(served("hybrid", n, 200.0 * n + 2e4, 150.0) for n in (100, 200, 400)),
    *(served("mamba2", n, 5e4, 250.0) for n in (100, 200, 400)),
)


def trained(kind: str, nats: float, loads: list[list[float]], reason: str = "") -> results.Row:
    measures = {"loss_nats": nats}
    if loads:
        flat = [load for layer in loads for load in layer]
        measures |= {"busiest_load_ratio": max(flat), "idle_experts": sum(load < 0.1 for load in flat)}
    settings = {"experts": 4, "active": 2, "shared": 1, "width": 8, "parameters": 1234, "loads": loads}
    return rows.timed_row(
        SESSION, [], suite="expert-training", case="english", backend=kind, phase="step", problem="2 layers", reason=reason,
        measures={} if reason else measures, settings=settings,
    )  # fmt: skip


EXPERTS = (
    trained("dense", 1.5, []),
    trained("balanced", 1.25, [[1.5, 0.5, 1.25, 0.75], [1.0, 1.0, 1.0, 1.0]]),
    trained("unbalanced", 1.375, [[0.0, 3.5, 0.5, 0.0], [0.25, 0.5, 2.25, 1.0]]),
)


def test_the_title_names_what_a_sequence_takes_at_the_longest_context_of_all() -> None:
    due = "At 400 tokens a sequence takes 400\xa0kB with attention, 100\xa0kB in a hybrid, 50\xa0kB with Mamba-2"
    assert context_section.claim(CONTEXT) == due
    # attention alone reaches further
    assert context_section.claim([*CONTEXT, served("attention", 800, 8e5, 800.0)]) == due
    assert context_section.claim(CONTEXT[:3]) == "Memory and time against context"


def test_context_has_a_chart_per_quantity_with_names_at_the_lines_and_where_they_cross() -> None:
    shown = context_section.section(Study(here=CONTEXT, committed=()))
    (part,) = shown["parts"]
    # nothing was read in these rows
    memory, write = part["charts"]
    assert memory.title == "Memory of a sequence: at 400 tokens attention 400\xa0kB, hybrid 100\xa0kB, Mamba-2 50\xa0kB"
    assert write.note == "Below attention: the hybrid from 200 tokens on, Mamba\N{NON-BREAKING HYPHEN}2 from 400 tokens on."
    assert write.table.rows[0] == ["100", "100\xa0µs", "150\xa0µs", "250\xa0µs"]
    picture = str(memory.picture)
    assert Page(picture).open == []
    assert ">bytes in the caches, one sequence</text>" in picture
    names = re.findall(r'<text class="label (\w+)"[^>]*>([^<]+)<', picture)
    assert names == [("gold", "attention"), ("third", "hybrid"), ("rose", "Mamba-2")]
    slow = [replace(row, measures=row.measures | {"write_us": 1e6}) for row in CONTEXT[3:]]
    found = context_section.by_context([*CONTEXT[:3], *slow], "write", "write_us")
    assert context_section._crossing(found).count("at none of these lengths") == 2
    both = context_section.section(Study(here=CONTEXT[:3], committed=CONTEXT))
    assert [part["title"] for part in both["parts"]] == ["On a GPU", "The same on this machine"]
    assert both["claim"] == context_section.claim(CONTEXT)


def test_a_model_that_fails_is_a_sentence_on_the_page() -> None:
    failed = rows.timed_row(SESSION, [], suite="context", case="context", backend="mamba2", phase="write", reason="failed: no")
    (part,) = context_section.section(Study(here=(*CONTEXT[:6], failed), committed=()))["parts"]
    assert part["failed"] == ["Mamba-2: failed: no"]
    (part,) = experts_section.section(Study(here=(EXPERTS[0], trained("balanced", 0, [], "failed: no")), committed=()))["parts"]
    assert part["failed"] == ["experts, balance loss: failed: no"]
    assert len(part["charts"]) == 1


def test_the_title_on_experts_says_both_losses_and_both_loads() -> None:
    assert experts_section.claim(EXPERTS) == (
        "Experts are 0.25 nats below a dense layer of equal active width; the busiest gets 1.5× the mean load, and 3.5× without "
        "the balance loss"
    )
    alike = (replace(EXPERTS[0], measures={"loss_nats": 1.252}), *EXPERTS[1:])
    assert experts_section.claim(alike).startswith("Experts equal the loss of a dense layer")
    worse = (replace(EXPERTS[0], measures={"loss_nats": 1.0}), *EXPERTS[1:])
    assert experts_section.claim(worse).startswith("Experts are 0.25 nats above a dense layer")
    assert experts_section.claim(EXPERTS[:1]) == "Experts: their loss, and how they share the tokens"


def test_loads_are_squares_sorted_by_layer_and_darker_where_an_expert_is_busier() -> None:
    (part,) = experts_section.section(Study(here=EXPERTS, committed=()))["parts"]
    losses, balanced, unbalanced = part["charts"]
    assert losses.title == "Loss on held-out English: experts, balance loss has the least"
    near = tuple(replace(row, measures=row.measures | {"loss_nats": 1.5 + n / 1000}) for n, row in enumerate(EXPERTS))
    assert experts_section.losses(experts_section.by_kind(near)).title == "Loss on held-out English: all within 0.01 nats"
    assert losses.table.rows[2] == ["experts without it", "1.3750", "1,234", "3.5×", "2"]
    assert balanced.title == "With the balance loss the busiest expert has 1.5× the mean load"
    assert "2 of 8 experts get less than a tenth" in unbalanced.note
    squares = re.findall(r'fill-opacity="([\d.]+)"><title>(layer \d), expert \d: ([\d.]+)×', str(unbalanced.picture))
    assert [(layer, load) for _, layer, load in squares] == [
        ("layer 1", "3.5"), ("layer 1", "0.5"), ("layer 1", "0"), ("layer 1", "0"),
        ("layer 2", "2.25"), ("layer 2", "1"), ("layer 2", "0.5"), ("layer 2", "0.25"),
    ]  # fmt: skip
    shades = [float(shade) for shade, *_ in squares[:4]]
    assert shades[0] > shades[1] > shades[2] == shades[3] > 0


def test_a_heat_map_shows_its_scale_and_nothing_is_darker_than_its_end() -> None:
    drawn = heat_map([[9.0, 1.0]], title="t", row_name="row", column_name="place", scale=(0, 1, 2), write=lambda x: f"{x:g}")
    assert Page(drawn).open == []
    assert re.findall(r">([\d.]+(?: or more)?)</text>", drawn) == ["0", "1", "2 or more"]
    assert re.findall(r'fill-opacity="([\d.]+)"><title>row', drawn) == ["1.00", "0.52"]


def test_points_stand_on_one_scale() -> None:
    drawn = charts.points(
        [("a", "ours", 2.0), ("b", "rose", 3.0), ("c", "gold", 2.5)], title="t", x_name="x", write=lambda x: f"{x:g}"
    )
    (a,) = re.findall(r'class="mark ours" cx="([\d.]+)"', drawn)
    (c,) = re.findall(r'class="mark gold" cx="([\d.]+)"', drawn)
    (b,) = re.findall(r'class="mark rose" x="([\d.]+)"', drawn)
    assert float(c) == pytest.approx((float(a) + float(b) + 3.6) / 2, abs=0.2)


def test_committed_rows_of_a_suite_are_the_last_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert studies.committed(path, "context") == ()
    later = replace(served("attention", 100, 7.0, 7.0), date="2027-01-01T00:00:00+00:00")
    results.append(path, [one.json() for one in [*CONTEXT, later, EXPERTS[0]]])
    found = studies.committed(path, "context")
    assert len(found) == len(CONTEXT)
    assert min(row.measures["sequence_bytes"] for row in found) == 7.0
