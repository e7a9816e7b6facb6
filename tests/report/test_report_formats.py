"""The section about training for a format: its losses are those of the models, the engine's too, and titles follow from them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from rooftile_lab.report import formats, formats_section, planned
from rooftile_lab.report.plan import plan_for

COSTS = (
    formats.Cost(format="int8", nbytes=700_000, rounded=1.501, trained=1.4995),
    formats.Cost(format="int4:32", nbytes=504_000, rounded=1.519, trained=1.508),
    formats.Cost(format="int4:row", nbytes=483_000, rounded=1.520, trained=1.505),
)
PLANNED = planned.Planned(
    dtype="fp32", on_gpu=False, ceilings={"copy_gbs": 10.0, "cache_gbs": 40.0, "matmul_tflops": {"fp32": 0.1}}, most_loss=0.01,
    losses=(0.0, 0.0, 0.0), products=tuple(
        planned.Product(
            name="down", rows=rows, flops=1e5 * rows, nbytes=2e5, time_us=10.0 + rows, chosen=("fp32", "fp32"),
            chosen_us=10.0 + rows, chosen_bytes=2e5,
        )
        for rows in planned.ROWS
    ),
)  # fmt: skip
FOUND = formats.Formats(
    parameters=492_160, nbytes=1_968_640, steps=400, full=((400, 1.6), (440, 1.55), (480, 1.5)),
    rounded=((400, 1.62), (440, 1.57), (480, 1.52)), trained=((400, 1.62), (440, 1.56), (480, 1.505)), pictured="int4:row",
    served_rounded=1.5201, served_trained=1.5049, costs=COSTS, planned=PLANNED,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> formats.Formats:
    said: list[tuple[float, str]] = []
    found = formats.measure(plan_for("cpu", quick=True), "cpu", lambda share, words: said.append((share, words)))
    assert [share for share, _ in said] == sorted(share for share, _ in said)
    return found


def test_the_engine_has_the_losses_of_the_models(measured: formats.Formats) -> None:
    assert measured.served_rounded == pytest.approx(measured.rounded[-1][1], abs=1e-5)
    assert measured.served_trained == pytest.approx(measured.trained[-1][1], abs=1e-5)
    assert measured.served_rounded != measured.served_trained


def test_curves_begin_together_and_end_at_the_formats_losses(measured: formats.Formats) -> None:
    steps = [step for step, _ in measured.full]
    study = formats.SMALL
    assert steps == list(range(study.steps, study.steps + study.further_steps + 1))
    assert [step for step, _ in measured.rounded] == [step for step, _ in measured.trained] == steps
    # at the start both are the same model, rounded
    assert measured.rounded[0] == measured.trained[0]
    assert measured.rounded[0] != measured.full[0]
    assert [one.format for one in measured.costs] == list(formats.FORMATS)
    (pictured,) = (one for one in measured.costs if one.format == measured.pictured)
    assert (pictured.rounded, pictured.trained) == (measured.rounded[-1][1], measured.trained[-1][1])
    assert measured.continued == measured.full[-1][1]


def test_bytes_are_those_of_codes_scales_and_all_else(measured: formats.Formats) -> None:
    study = formats.SMALL
    projections = study.layers * (4 * study.hidden**2 + 3 * study.hidden * study.ffn)
    rows = study.layers * (4 * study.hidden + 2 * study.ffn + study.hidden)
    others = measured.nbytes - 4 * projections
    nbytes = {one.format: one.nbytes for one in measured.costs}
    assert nbytes["int8"] == others + projections + 4 * rows
    assert nbytes["int4:row"] == others + projections // 2 + 2 * rows
    assert nbytes["mxfp4"] == others + projections // 2 + projections // 32


def test_a_training_that_diverges_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "SMALL", replace(formats.SMALL, rate=1e30))
    with pytest.raises(ArithmeticError, match="not finite at the learning rate"):
        formats.measure(plan_for("cpu", quick=True), "cpu", lambda share, words: None)
    assert torch.get_num_threads() > 0


@pytest.mark.parametrize(
    ("rounded", "trained", "title"),
    [
        (1.520, 1.505, "Training for int4:row wins back 75\N{NO-BREAK SPACE}% of the 0.0200 nats per byte that rounding costs"),
        (1.520, 1.490, "Training for int4:row wins back 100\N{NO-BREAK SPACE}% of the 0.0200 nats per byte that rounding costs"),
        (1.520, 1.530, "Training for int4:row wins nothing back that shows: rounding costs +0.0200 nats per byte"),
        # single trainings differ by a hundredth, so less than that is no finding
        (1.520, 1.512, "Training for int4:row wins nothing back that shows: rounding costs +0.0200 nats per byte"),
        (1.509, 1.490, "Rounding to int4:row costs this Llama nothing that shows"),
        (1.499, 1.490, "Rounding to int4:row costs this Llama nothing that shows"),
    ],
)
def test_the_title_says_what_training_wins_back(rounded: float, trained: float, title: str) -> None:
    costs = (*COSTS[:2], replace(COSTS[2], rounded=rounded, trained=trained))
    assert formats_section.claim(replace(FOUND, costs=costs)) == title


def test_pictures_have_a_point_for_each_number() -> None:
    shown = formats_section.section(FOUND)
    curves, frontier, _ = (str(chart.picture) for chart in shown["charts"])
    assert curves.count('class="ring') == 2
    assert "served by rooftile.LLM: 1.5201" in curves
    for loss in ("1.6000", "1.5700", "1.5050"):
        assert f": {loss}<" in curves
    for words in ("int4:row, rounded: +0.0200", "int4:row, trained: +0.0050", "int8, trained: -0.0005"):
        assert words in frontier
    # names do not cover each other
    places = [float(y) for y in re.findall(r'<text class="label" x="[\d.]+" y="([\d.]+)"', frontier)]
    left = sorted(places[:2])
    assert len(places) == 3
    assert left[1] - left[0] >= formats_section.LINE
    table = shown["charts"][1].table
    assert table.rows[1] == ["int8", "700\N{NO-BREAK SPACE}kB", "+0.0010", "-0.0005"]
