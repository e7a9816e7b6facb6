"""The plan on the page: its products are those of the plan, and its words say what was chosen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import rooftile as rt
from rooftile.models import TrainableDecoder
from rooftile_lab.report import planned, planned_picture
from tests.report.test_report_formats import PLANNED


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    TrainableDecoder(97, hidden=32, heads=2, layers=2, ffn=64, max_len=32).save(folder)
    return folder


def test_products_are_those_of_the_plans(decoder) -> None:
    said: list[float] = []
    found = planned.measure(decoder, torch.arange(34).view(2, 17), "cpu", lambda share, words: said.append(share))
    assert said == [0.0, 1 / 3, 2 / 3]
    assert [one.rows for one in found.products] == [rows for rows in planned.ROWS for _ in range(5)]
    assert [one.name for one in found.products[:5]] == ["q, k, v", "o", "gate, up", "down", "head"]
    down = found.products[8]
    assert (down.rows, down.flops) == (16, 2 * 16 * 32 * 64)
    # x, y and the weight of one call, in fp32
    assert down.nbytes == 4 * (16 * 64 + 16 * 32 + 32 * 64)
    assert len(down.chosen) == 2
    assert all(one.time_us > 0 for one in found.products)
    assert found.dtype == "fp32"
    assert len(found.losses) == 3


def test_layers_that_choose_differently_are_one_product(decoder) -> None:
    plan = rt.plan(decoder, rows={"decode": 4}, context=16, formats=["bf16", "int8", "2:4"], measure=False, device="cpu")
    layers = [replace(layer, chosen="int8" if "layers.1" in layer.name else "2:4") for layer in plan.layers[:-1]]
    down = planned.products_of(layers, 4)[3]
    its = [layer for layer in layers if "down" in layer.name]
    assert (down.name, down.chosen, down.words, down.changes) == ("down", ("2:4", "int8"), "2:4 or int8", True)
    assert down.chosen_us == pytest.approx(sum(layer.choice.us for layer in its) / 2)
    # the weight (32, 64) has 17/32 of its bytes in 2:4, and a quarter with 32 scales in INT8
    weight = 4 * 32 * 64
    assert down.chosen_bytes == down.nbytes - weight + (weight * 17 // 32 + weight // 4 + 4 * 32) / 2


def picture(found: planned.Planned) -> str:
    return str(planned_picture.chart(found).picture)


def test_a_plan_that_keeps_all_says_why() -> None:
    chart = planned_picture.chart(PLANNED)
    assert chart.title == "Planned for 1, 16 and 256 rows, every product of this Llama stays in fp32"
    assert "Everything stays in fp32: a CPU computes formats by their definitions" in chart.note
    assert "no format that is allowed is faster" in planned_picture.note(replace(PLANNED, on_gpu=True))
    drawn = str(chart.picture)
    assert "move" not in drawn
    for words in ("1 row<", "16 rows<", "256 rows<", "DRAM 10", "down, 16 rows: 26", "stays fp32"):
        assert words in drawn
    assert chart.table.rows == [["down", *(f"fp32, {us}\N{NO-BREAK SPACE}µs" for us in (11, 26, 266))]]


def test_changes_are_arrows_and_shares() -> None:
    first, second, third = PLANNED.products
    changed = (
        replace(first, chosen=("int4:32", "int4:32"), chosen_us=2.75, chosen_bytes=4e4), second,
        replace(third, chosen=("int8", "2:4"), chosen_us=133.0, chosen_bytes=1e5),
    )  # fmt: skip
    found = replace(PLANNED, products=changed, losses=(0.004, 0.0, 0.0123))
    chart = planned_picture.chart(found)
    assert chart.title == "Planned for 1, 16 and 256 rows, 2 of 3 products change their format"
    assert "the model loses +0.0040, +0.0000, +0.0123 nats per byte" in chart.note
    drawn = str(chart.picture)
    assert drawn.count('class="move"') == 2
    assert "int4:32, 25\N{NO-BREAK SPACE}%" in drawn
    # two formats have no share in common
    assert ">int8/2:4<" in drawn
    assert chart.table.rows[0][1] == "int4:32, 2.75\N{NO-BREAK SPACE}µs of 11\N{NO-BREAK SPACE}µs"
    (path,) = re.findall(r'class="move" d="M ([\d.]+) ([\d.]+) L ([\d.]+) ([\d.]+)[^>]*><title>down, 1 row:', drawn)
    x1, y1, x2, y2 = map(float, path)
    assert x2 > x1, "fewer bytes for the same arithmetic"
    assert y2 < y1, "faster is higher"


def test_no_roof_is_below_what_was_measured() -> None:
    fast = replace(PLANNED.products[2], time_us=100.0)
    found = replace(PLANNED, products=(*PLANNED.products[:2], fast))
    # 2.56e7 FLOPs in 100 µs are more than 0.1 TFLOP/s
    assert "fp32 256" in picture(found)
    assert "fp32 100" in picture(PLANNED)
    units = PLANNED.ceilings | {"matmul_tflops": {"fp32": 0.1, "fp8": 0.4, "fp16": 0.101}}
    on_gpu = picture(replace(PLANNED, on_gpu=True, ceilings=units))
    assert "fp8 400" in on_gpu
    assert "fp16" not in on_gpu, "it would be drawn on fp32"
    assert "fp8" not in picture(replace(PLANNED, ceilings=units))
