"""`LLM(weights="2:4")` on a GPU: it says what a decoder with masked weights says, and libraries lay weights out before graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rooftile as rt
from rooftile.engine import LLM, SamplingParams
from rooftile.models import Decoder
from rooftile.weights.two_four import TwoFour, two_four
from rooftile.weights.two_four.product import cusparselt
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.engine.test_two_four_weights import masked
from tests.models.quantised import plain

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    plain(path, hidden_size=256, intermediate_size=512)
    return path


def nats(llm: LLM) -> float:
    """The mean of minus the log probabilities of the prompts' tokens, and of one answer token each."""
    found = llm.generate(prompts(24), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    each = [
        one[token].logprob
        for output in found if output.prompt_logprobs
        for token, one in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True) if one
    ]  # fmt: skip
    assert_clean(llm)
    return -sum(each) / len(each)


@pytest.mark.parametrize("how", [{}, {"enforce_eager": True}, {"deterministic": True}, {"max_batched_tokens": 13}], ids=str)
def test_losses_are_those_of_the_masked_model(folder: Path, how: dict) -> None:
    wanted = {"dtype": torch.bfloat16, "device": "cuda"}
    due = nats(LLM(masked(folder).to("cuda", torch.bfloat16), **ROOM))
    assert nats(LLM(folder, weights="2:4", **wanted, **ROOM, **how)) == pytest.approx(due, abs=0.02)
    assert nats(LLM(folder, **wanted, **ROOM)) != pytest.approx(due, abs=0.02)


def test_weights_are_laid_out_before_graphs_are_captured(folder: Path) -> None:
    reason = cusparselt.lack_of_library(torch.device("cuda"))
    if reason:
        pytest.skip(reason)
    decoder = LLM(folder, weights="2:4", dtype=torch.bfloat16, device="cuda", **ROOM).engine.runner.decoder
    parts = [
        part
        for layer in decoder.layers
        for one in (layer.qkv, layer.o, layer.feed_forward.up, layer.feed_forward.down)
        for part in one.parts
    ]
    assert len(parts) == 4 * len(decoder.layers)
    assert all(isinstance(part, TwoFour) and part.values in cusparselt._PACKED for part in parts)


def test_a_plan_of_a_decoder_has_2_4(folder: Path) -> None:
    decoder = Decoder.from_folder(folder, dtype=torch.bfloat16, device="cuda")
    plan = rt.plan(decoder, rows={"decode": 8, "prompt": 256}, context=64, formats=["2:4"])
    assert {layer.chosen for layer in plan.layers[:-1]} == {"2:4"}
    assert all(layer.choice.measured_us for layer in plan.layers[:-1])
    weight = decoder.layers[0].o.weight.clone()
    assert torch.equal(plan.apply(decoder).layers[0].o.parts[0].dense(), weight * two_four(weight))
