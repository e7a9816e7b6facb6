"""The suite of quality: bytes and losses of a small Llama whose weights are quantised."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import rooftile as rt
from rooftile_lab.bench.learning.english import English
from rooftile_lab.bench.suites import quality
from rooftile_lab.bench.weighing import FORMATS, Weighed, nats_per_token, plain_bytes, quantised, weigh
from tests.bench.session import SESSION


def test_rows_of_a_tiny_model() -> None:
    found = {row.backend: row for row in quality.measure(SESSION, ["tiny-1"], lambda words: None)}
    assert list(found) == ["float32", *FORMATS]
    assert found["float32"].measures["above_nats"] == 0
    # q and o 64 x 64, k and v 64 x 32, three of the feed-forward, in two layers
    numbers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert found["float32"].measures["projection_bytes"] == 4 * numbers
    assert numbers < found["int8"].measures["projection_bytes"] < 1.1 * numbers
    assert numbers / 2 < found["int4:64"].measures["projection_bytes"] < 0.6 * numbers
    assert abs(found["int8"].measures["above_nats"]) < 0.01
    assert abs(found["mxfp4"].measures["above_nats"]) < 0.5


def test_the_mean_over_seeds_is_that_of_differences() -> None:
    seeds = [[Weighed("float32", 8, 2.0), Weighed("fp8", 2, 2.1)], [Weighed("float32", 8, 3.0), Weighed("fp8", 2, 3.3)]]
    plain, fp8 = quality.rows_of(SESSION, "llama-2", seeds)
    assert plain.measures == {"above_nats": 0, "nats": 2.5, "projection_bytes": 8}
    assert fp8.measures["above_nats"] == pytest.approx(0.2)
    assert (fp8.low["above_nats"], fp8.high["above_nats"]) == (pytest.approx(0.1), pytest.approx(0.3))


def test_a_quantised_copy_computes_with_its_weights_and_the_model_stays() -> None:
    text = English.read("cpu")
    model = quality.trained(text, 0, 2, 1, 16, small=True).eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    changed, nbytes = quantised(model, "int4:32")
    assert nbytes < plain_bytes(model) / 6
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    # the same as a model whose weights were dequantised
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for child in parent.children():
                if isinstance(child, torch.nn.Linear):
                    child.weight.data = rt.quantise_weight(child.weight.detach(), "int4", group=32).dequantise(torch.float32)
    tokens, targets = text.tests(3, 16)
    assert nats_per_token(changed, tokens, targets, 2) == pytest.approx(nats_per_token(model, tokens, targets), rel=1e-5)
    assert [one.format for one in weigh(model, tokens, targets, ["w8"])] == ["float32", "w8"]
