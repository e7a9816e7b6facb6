"""The section about what a model weighs: its title follows from the numbers, and the rooflines from the ceilings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from rooftile_lab.bench.weighing import Weighed
from rooftile_lab.report import weights, weights_section
from rooftile_lab.report.plan import plan_for
from tests.bench.session import CEILINGS

PLAN = plan_for("cpu", quick=True)
ROOFS = tuple(weights.Roofline(name=name, points=((1, 1e9), (4096, 1e12))) for name in ("fp32", "8 bits", "4 bits"))
FOUND = weights.Weights(
    weighed=(Weighed("fp32", 8000, 2.0), Weighed("int8", 2000, 2.001), Weighed("int4:32", 1100, 2.02)), tokens_s={},
    size=(64, 32), rooflines=ROOFS,
    reached=(weights.Reached(name="8 bits", format="int8", rows=16, flops_per_s=2.5e9),),
)  # fmt: skip


def test_the_title_names_the_smallest_format_that_loses_next_to_nothing() -> None:
    assert weights_section.claim(FOUND) == "In int8 the Llama's projections are 4.0× smaller, at +0.0010 nats per byte"
    worse = replace(FOUND, weighed=(FOUND.weighed[0], FOUND.weighed[2]))
    assert weights_section.claim(worse) == "Every format of few bits costs this Llama more than 0.01 nats per byte"


def test_charts_and_a_table_where_there_is_a_gpu() -> None:
    shown = weights_section.section(FOUND)
    assert [chart.title.split(":")[0] for chart in shown["charts"]] == [
        "Bytes of the projections", "Nats per byte above fp32", "Where bytes bind, and where arithmetic"
    ]  # fmt: skip
    assert "+0.0200" in str(shown["charts"][1].picture)
    assert "int8, 16 rows: 2.5 G reached" in str(shown["charts"][2].picture)
    assert shown["table"] is None
    table = weights_section.section(replace(FOUND, tokens_s={"fp32": 1234.5}))["table"]
    assert table.rows == [["fp32", "1,234"]]


def test_rooflines_are_bound_by_bytes_then_by_arithmetic() -> None:
    rates = CEILINGS.rates("fp32")
    plain, eight, four = weights.rooflines(PLAN, CEILINGS, (512, 256), (1, 100_000))
    for line, of_weight in ((plain, 4.0), (eight, 1.0), (four, 0.5)):
        moved = of_weight * 512 * 256 + 4 * (512 + 256)
        assert line.points[0][1] == pytest.approx(2 * 512 * 256 / moved * rates.bytes_per_s)
        assert line.points[1][1] == pytest.approx(rates.flops_per_s)


def test_a_checkpoint_is_weighed_and_answers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 256}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=None)).save_pretrained(tmp_path)
    found = weights.measure(PLAN, tmp_path, "cpu", lambda share, words: None)
    assert [(one.name, one.format, one.rows) for one in found.reached] == [
        (name, format, rows)
        for rows in (1, 16, 256)
        for name, format in (("fp32", "fp32"), ("8 bits", "int8"), ("4 bits", "int4"))
    ]
    assert all(one.flops_per_s > 0 for one in found.reached)
    names = [one.format for one in found.weighed]
    # groups of 64 do not divide rows of 32
    assert names == ["fp32", "fp8", "int8", "w8", "int4:32", "mxfp8", "mxfp4", "nvfp4"]
    assert found.weighed[0].nbytes == 4 * (4 * 32 * 32 + 3 * 32 * 64)
    assert not found.tokens_s
    assert weights.tokens_per_second(tmp_path, "w8", "cpu", 3) > 0
