"""The page of a diagnosis: every number of the record, pictures that are true, and no name that breaks it."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rooftile.cli.app import app
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.output.json_rows import Op
from rooftile.diagnosis.output.pictures.bars import time_line, waterfall
from rooftile.diagnosis.output.pictures.roofline import roofline
from rooftile.diagnosis.output.pictures.roofs import roofs, spot, under
from rooftile.diagnosis.output.pictures.sweeps import knee_us, sweep_chart, sweep_points
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.drawing.labels import Box
from rooftile.drawing.units import count, duration, percent, size
from tests.diagnosis.output.test_diagnosis import example
from tests.diagnosis.page_of import Page

CEILINGS = {"copy_gbs": 4000.0, "cache_gbs": 12000.0, "matmul_tflops": {"fp32": 50.0, "bf16": 700.0, "fp8": 1300.0}}


def shown(**changes: object) -> Diagnosis:
    return example(ceilings=CEILINGS, **changes)


def page(found: Diagnosis) -> Page:
    return Page(found.to_html())


def test_the_page_has_the_whole_record_and_loads_nothing() -> None:
    found = shown()
    read = page(found)
    assert read.record == json.loads(found.to_json())
    assert [e for e in read.elements if {"src", "srcset", "action"} & e.attributes.keys()] == []
    assert [e.attributes["href"] for e in read.elements if "href" in e.attributes] == ["#numbers"]
    assert found.sentence in read.words
    assert read.named("link") == []


def test_every_number_of_an_operator_stands_in_its_row() -> None:
    found = shown()
    words = page(found).words
    for op in found.ops:
        due = [duration(op.time_us), percent(op.share), f"{op.calls:,}", op.op.split("::")[-1]]
        due += [op.confidence, op.confirmed_by, op.where]
        due += [write(value) for write, value in ((count, op.flops), (size, op.bytes)) if value is not None]
        due += [count(op.achieved, "B/s")] if op.roof == "HBM" and op.achieved else []
        due += [duration(us) for us in op.experiments["intensity"]["time_us"] + op.experiments["intensity"]["added_us"]]
        due += [duration(us) for us in (op.experiments["cache"]["time_us"], op.experiments["size"]["fixed_us"]) if us is not None]
        assert [piece for piece in due if piece not in words] == [], op.op
    step = found.step
    due = [*map(duration, (step.time_us, step.busy_us, step.spread_us, *step.idle_us.values()))]
    due += [count(step.flops), size(step.peak_bytes)]
    due += [duration(step.experiments["graph_us"]), *map(percent, step.shares.values()), *found.notes, *found.uncounted]
    due += [word for r in found.remedies for word in (r.name, duration(r.predicted_us), r.how)]
    assert [piece for piece in due if piece not in words] == []


def test_hostile_names_are_words_and_nothing_else() -> None:
    notes = ["</script><script>alert(1)</script>", "a & b < c"]
    found = shown(notes=notes, machine={"name": "<b>chip</b>", "x": {"<i>": "</dl>"}})
    evil, bad = "<script>alert('x')</script>", '"><b>'
    ops = tuple(
        replace(op, module=evil * (50 if n else 1), op=f"mine::{evil}", where=evil, confirmed_by=evil, kernels=(evil,), bound=bad)
        for n, op in enumerate(found.ops)
    )
    remedies = tuple(replace(r, name=evil + "y" * 300, how=evil) for r in found.remedies)
    found = replace(found, ops=ops, remedies=remedies, program=replace(found.program, command=evil, step=evil))
    read = page(found)
    assert len(read.scripts) == 2
    assert read.record == json.loads(found.to_json())
    assert read.words.count(evil) > len(ops)
    assert "alert" not in read.scripts[1]


def test_a_page_of_nothing_but_unknowns() -> None:
    found = shown()
    blank = dict.fromkeys(("module", "op", "phase", "confirmed_by", "where"), "") | {
        "calls": 1, "confidence": "modelled", "kernels": (), "experiments": {}, "remedies": (7,), "share": float("nan"),
        "time_us": float("nan"),
    }  # fmt: skip
    unknown = Op(**{f.name: blank.get(f.name) for f in fields(Op)})
    step = replace(
        found.step, time_us=float("nan"), spread_us=None, launches=None, flops=None, bytes=None, peak_bytes=None, busy_us=None,
        idle_us={"host": float("inf")}, overhead_share=None, bound=None, shares={}, experiments={},
    )  # fmt: skip
    read = page(replace(found, ops=(unknown,), step=step, remedies=(), ceilings={}, machine={}, notes=(), counters=()))
    assert "nan" not in read.words.lower()
    assert re.findall(r"\bNone\b(?! is known)", read.words) == []
    assert read.named("polyline") == []


def test_a_page_of_no_operator() -> None:
    words = page(shown(findings=[], remedies=[], kernels={}, counters=[])).words
    assert "No operator was seen in the step." in words
    assert "None is known that would save time." in words


def drawn(found: Diagnosis) -> Page:
    chart = roofline(found.ceilings, found.step, found.ops, found.remedies, [op.op for op in found.ops], True)
    assert chart is not None
    return Page(str(chart.picture))


def numbers(element, *names: str) -> list[float]:
    return [float(element.attributes[name]) for name in names]


def test_points_lie_under_their_roofs_and_grow_with_time() -> None:
    found = shown()
    lines = roofs(found.ceilings, found.ops, True)
    assert [(line.name, line.rate, line.measured) for line in lines] == [
        ("HBM", 4e12, None), ("L2", 12e12, None), ("fp8", 1.3e15, None), ("bf16", 7e14, None),
    ]  # fmt: skip
    for op in found.ops:
        if (where := spot(op)) is not None:
            assert where.y <= 1.001 * max(min(m.at(where.x), c.at(where.x)) for m in lines[:2] for c in lines[2:])
            assert (where.x, where.y) == pytest.approx((op.intensity, op.flops / op.time_us * 1e6))
    circles = drawn(found).named("circle", "point")
    assert len(circles) == 3
    areas = [float(c.attributes["r"]) ** 2 for c in circles]
    assert areas[1] / areas[0] == pytest.approx(found.ops[1].time_us / found.ops[0].time_us, rel=0.02)
    assert [c.attributes["class"].split()[1] for c in circles] == ["memory", "compute", "latency"]


def test_no_roof_is_below_a_measured_operator() -> None:
    """A ceiling that was measured while the machine was busy is drawn where an operator was, and the page says so."""
    slow = CEILINGS | {"copy_gbs": 1000.0, "cache_gbs": 2000.0, "matmul_tflops": {"fp32": 5.0, "bf16": 70.0}}
    found = example(ceilings=slow)
    lines = roofs(slow, found.ops, True)
    memory = max(line.rate for line in lines if line.is_memory)
    peak = max(line.rate for line in lines if not line.is_memory)
    for op in found.ops:
        if (where := spot(op)) is not None:
            assert where.y <= 1.001 * min(memory * where.x, peak)
    chart = roofline(slow, found.step, found.ops, (), [op.op for op in found.ops], True)
    assert "was measured as 2 TB/s; an operator was faster" in chart.note.replace("\xa0", " ")
    assert under(spot(found.ops[0]), lines).y <= peak


def test_arrows_end_where_the_remedy_led() -> None:
    found = shown()
    fused = Remedy(name="fuse", ops=(0,), predicted_us=2000, measured_us=found.ops[0].time_us / 2, how="", changes="nothing")
    read = drawn(replace(found, remedies=(fused,)))
    (arrow,) = read.named("path", "move")
    x1, y1, x2, y2, *_ = map(float, re.findall(r"-?[\d.]+", arrow.attributes["d"]))
    cx, cy = numbers(read.named("circle", "point")[0], "cx", "cy")
    assert (x1, y1) == pytest.approx((cx, cy), abs=0.11)
    assert y2 < y1
    # twice the rate at 98 % of HBM's roof would be above it, but L2's is three times as high
    assert x2 == pytest.approx(x1, abs=0.11)
    untried = drawn(replace(found, remedies=(replace(fused, measured_us=None),)))
    assert untried.named("path", "move") == []
    slower = drawn(replace(found, remedies=(replace(fused, measured_us=-5000.0),)))
    down = list(map(float, re.findall(r"-?[\d.]+", slower.named("path", "move")[0].attributes["d"])))
    assert down[3] > down[1]


def many(found: Diagnosis) -> Diagnosis:
    """Forty operators in a narrow place."""
    base = found.ops[0]
    ops = tuple(
        replace(
            base,
            op=f"aten::op{n}",
            flops=base.flops * (1 + n % 7),
            bytes=base.bytes * (1 + n % 3),
            time_us=base.time_us * (1 + n / 9),
        )
        for n in range(40)
    )
    return replace(found, ops=ops, remedies=())


def test_labels_cover_no_point_no_line_and_no_other_label() -> None:
    source = many(shown())
    chart = roofline(CEILINGS, source.step, source.ops, (), [op.op for op in source.ops], True)
    assert chart is not None
    words = re.findall(r'<text class="tick" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]+)</text>', str(chart.picture))
    inside = [(Box.of_words(w, float(x), float(y), a), w) for x, y, a, w in words if float(x) > 62 and float(y) < 338]
    assert [w for _, w in inside if w.isdigit()]
    read = Page(str(chart.picture))
    for (a, one), (b, other) in ((p, q) for n, p in enumerate(inside) for q in inside[:n]):
        apart = a.left >= b.right or b.left >= a.right or a.top >= b.bottom or b.top >= a.bottom
        assert apart, (one, other)
    for box, word in inside:
        for circle in read.named("circle", "point"):
            cx, cy, r = numbers(circle, "cx", "cy", "r")
            near = (min(max(cx, box.left), box.right) - cx) ** 2 + (min(max(cy, box.top), box.bottom) - cy) ** 2
            assert near >= (r - 0.1) ** 2, word
        for path in read.named("path", "roof"):
            x1, y1, x2, y2 = map(float, re.findall(r"-?[\d.]+", path.attributes["d"]))
            for n in range(400):
                x, y = x1 + (x2 - x1) * n / 399, y1 + (y2 - y1) * n / 399
                assert not (box.left < x < box.right and box.top < y < box.bottom), word


def test_a_sweep_is_drawn_with_its_knee_and_both_ways_that_it_could_go() -> None:
    norm = shown().ops[0]
    points = sweep_points(norm)
    assert [x for x, _ in points] == norm.experiments["intensity"]["added_us"]
    # 100 us of traffic, 2 of fixed cost: time rises from 100 us of arithmetic
    assert knee_us(points) == pytest.approx(100, rel=0.05)
    chart = sweep_chart(norm, "norm")
    read = Page(str(chart.picture))
    assert len(read.named("circle", "mark")) == len(points)
    assert len(read.named("path", "bracket")) == 1
    assert list(chart.table.rows) == [[duration(x), duration(y)] for x, y in points]
    measured = next(e for e in read.named("polyline", "ours") if "dashed" not in e.attributes["class"])
    heights = [float(pair.split(",")[1]) for pair in measured.attributes["points"].split()]
    assert all(later <= sooner + 2 for sooner, later in pairwise(heights))
    gone = replace(norm, experiments={"intensity": {"added_us": [0.0], "time_us": [3.0]}})
    assert sweep_chart(gone, "norm") is None
    assert sweep_points(replace(norm, experiments={"intensity": {"added_us": [0.0, None], "time_us": [3.0, 4.0]}})) == []


def widths(chart, kind: str) -> list[float]:
    return [float(e.attributes["width"]) for e in Page(str(chart.picture)).named("rect", kind)]


def test_the_time_line_adds_up_to_the_step() -> None:
    found = shown()
    drawn = Page(str(time_line(found.step, found.ops).picture))
    bars = [e for e in drawn.named("rect", "stack") if e.attributes["height"] == "22"]
    idle = {e.attributes["class"].split()[1]: float(e.attributes["width"]) for e in bars if "part-" in e.attributes["class"]}
    assert sum(idle.values()) == pytest.approx(480, abs=1)
    assert idle["part-host"] / 480 == pytest.approx(46000 / 53700, abs=0.01)
    assert idle["part-busy"] / 480 == pytest.approx(7300 / 53700, abs=0.01)
    assert idle["part-rest"] / 480 == pytest.approx(200 / 53700, abs=0.01)


def test_the_waterfall_is_to_scale_and_has_both_savings() -> None:
    found = shown()
    tried = replace(found, remedies=(replace(found.remedies[0], measured_us=44000.0), *found.remedies[1:]))
    chart = waterfall(tried.step, tried.remedies)
    whole, after = widths(chart, "soft")
    assert widths(chart, "ours") == [pytest.approx(whole * 44000 / 53700, abs=0.2)]
    assert widths(chart, "predicted")[0] == pytest.approx(whole * tried.remedies[0].predicted_us / 53700, abs=0.2)
    assert after == pytest.approx(whole * (53700 - 44000 - tried.remedies[1].predicted_us) / 53700, abs=0.3)
    slower = waterfall(tried.step, [replace(tried.remedies[0], measured_us=-1e9)])
    assert max(map(float, re.findall(r'width="([\d.]+)"', str(slower.picture)))) <= 480
    assert slower.title == "No remedy saves time"
    assert waterfall(tried.step, []) is None


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = torch.rand(64, 64)\ndef step():\n    return x @ x\nfor _ in range(30):\n    step()\n")
    words = ["diagnose", str(script), "--step", "step", "--device", "cpu", "--budget", "0.3"]
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, [*words, "--html", str(out), "--json", str(tmp_path / "page.json")])
    assert result.exit_code == 0, result.output
    assert Page(out.read_text()).record == json.loads((tmp_path / "page.json").read_text())
    result = CliRunner().invoke(app, [*words, "--html", str(tmp_path)])
    assert "cannot be written" in str(result.output) + str(result.exception)
