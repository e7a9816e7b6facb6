"""The section of what bounds a program: its titles follow from the numbers, and its pictures show them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from rooftile.drawing.units import size
from rooftile_lab.report import diagnosis_section as shown
from rooftile_lab.report.diagnosis import Diagnosed, Repeats, attention_bytes, raise_arithmetic
from rooftile_lab.report.plan import DiagnosisPlan
from tests.diagnosis.output.test_diagnosis import example

# 1 ms of memory, and 0.1 ms per repeat
REPEATS = Repeats(
    bytes=1 << 28, points=tuple((r, max(1000.0, 100.0 * r), max(1100.0, 110.0 * r)) for r in (1, 2, 4, 8, 16, 32)), knee=10.0,
    measured_knee=10.0, sentence="",
)  # fmt: skip


def found(**changes: object) -> Diagnosed:
    eager = example()
    attention = replace(eager.ops[0], op="aten::bmm", bytes=10**9)
    eager = replace(eager, ops=(attention, *eager.ops[1:]), step=replace(eager.step, bytes=4 * 10**9))
    flash = replace(attention, op="aten::_scaled_dot_product_flash_attention_for_cpu", bytes=10**8)
    ours = replace(eager, ops=(flash, *eager.ops[1:]), step=replace(eager.step, bytes=10**9, time_us=20000.0))
    given = {"repeats": REPEATS, "eager": eager, "rooftile": ours, "decode": example(), "batch": 8, "why_not": {}}
    return Diagnosed(**given | changes)  # type: ignore[arg-type]


def test_the_titles_follow_from_the_numbers() -> None:
    assert shown.claim(found()) == f"{size(3e9)} of traffic go away: the training step moves 75\N{NO-BREAK SPACE}% fewer bytes"
    same = found()
    assert "go away" not in shown.claim(replace(same, rooftile=same.eager))
    assert "go away" not in shown.claim(found(eager=None))
    assert (attention_bytes(same.eager), attention_bytes(same.rooftile)) == (10**9, 10**8)
    assert shown.bytes_bars(same.eager, same.rooftile).title == "Attention moves 10× fewer bytes"
    assert shown.bytes_bars(same.rooftile, same.eager).title == "The bytes of a training step"


def test_the_curve_of_repeats_is_flat_then_rises_and_bends_where_the_ceilings_say() -> None:
    chart = shown.repeats_chart(REPEATS)
    assert chart.title == "4 operations in place of one take the same time"
    measured, expected = (
        [tuple(map(float, pair.split(","))) for pair in line.split()]
        for line in re.findall(r'<polyline class="line \w+" points="([^"]+)"', str(chart.picture))
    )
    assert len({y for _, y in measured[:4]}) == 1
    assert measured[4][1] > measured[5][1]
    # the corner at 10 repeats is a point of the prediction alone
    assert len(expected) == len(measured) + 1
    assert expected[4][1] == expected[0][1]
    assert measured[3][0] < expected[4][0] < measured[4][0]
    assert [row[0] for row in chart.table.rows] == ["1", "2", "4", "8", "16", "32"]


def test_the_section_shows_what_there_is() -> None:
    whole = shown.section(found())
    assert [chart.title for chart in whole["charts"]][2:4] == [
        "Training with eager attention: 53.7\N{NO-BREAK SPACE}ms per step",
        "Training with Rooftile's attention: 20\N{NO-BREAK SPACE}ms per step",
    ]
    assert whole["decode"].title.startswith("Decoding 8 answers at once")
    assert ("time", "53.7\N{NO-BREAK SPACE}ms", "20\N{NO-BREAK SPACE}ms") in [tuple(row) for row in whole["table"].rows]
    bare = shown.section(found(eager=None, rooftile=None, decode=None, repeats=None, why_not={"repeats": "no compiler"}))
    assert (bare["charts"], bare["table"], bare["decode"], bare["failed"]) == ([], None, None, ["repeats: no compiler"])
    assert json.loads(json.dumps(found().json(), allow_nan=False))["eager"]["form"] == "rooftile.diagnosis/1"


def test_without_a_compiler_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*unused: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch.compile", lambda *args, **kwargs: fails)
    why_not: dict[str, str] = {}
    plan = DiagnosisPlan(rungs=(1, 2), nbytes=1 << 12, batch=1, context=8, budget=0.1)
    assert raise_arithmetic(plan, "cpu", why_not) is None
    assert why_not == {"repeats": "1 could not run here: no C++ compiler"}
