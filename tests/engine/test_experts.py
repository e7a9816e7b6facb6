"""Models with experts in the engine: tokens are Transformers', however prompts are cut, found again, forked and preempted.

Mixed with others they are in test_engine.py, too, as all families.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import rooftile
from rooftile import InvalidInput
from rooftile.approximate import Loki, LokiLayers
from rooftile.engine import LLM, SamplingParams
from rooftile.engine.mixers.loki.calibration import calibrate
from rooftile.errors import Unsupported
from rooftile.models import Decoder, NativeSparseSizes
from rooftile.models.checkpoints.write import quantise_folder
from rooftile.models.experts.feed_forward import QUANTISED
from rooftile.weights import QuantisedWeight
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts, tokens_of
from tests.grids import swept
from tests.models.checkpoints import saved, theirs
from tests.models.experts import DEEPSEEK, DeepSeek

NAMES = [
    "mixtral",
    "mixtral, windows, wide heads",
    "qwen3_moe",
    "qwen3_moe, some dense",
    "olmoe",
    "olmoe, clipped",
    "gpt_oss",
    "gpt_oss, default positions",
]
# tokens per block of the cache
SIZE = 8
SETTINGS = {
    "together": ROOM,
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "preempted": {"max_model_len": 96, "num_blocks": 20},
    "preempted, in chunks": {"max_model_len": 96, "num_blocks": 16, "max_batched_tokens": 7},
    "deterministic": ROOM | {"deterministic": True, "max_batched_tokens": 50},
}


def ask(folder: Path, how: str, due: list[list[int]], asked: list[list[int]]) -> None:
    """The answers of an engine are those that are due."""
    llm = LLM(folder, block_size=SIZE, **SETTINGS[how])
    llm.engine._ahead = "preempted" in how
    assert tokens_of(llm, asked, GREEDY) == [[row] for row in due]
    assert (llm.engine.scheduler.preemptions > 0) == ("preempted" in how)
    assert max(len(set(row)) for row in due) > 8


def _traits(case: tuple[str, str]) -> list:
    """`make test` runs each model, and each family without a preemption, with one, and deterministic."""
    name, how = case
    family = name.split(",")[0]
    return [name, how, (family, "preempted" in how), (family, how == "deterministic")]


@pytest.mark.parametrize(("name", "how"), swept(product(NAMES, SETTINGS), _traits))
def test_greedy_tokens_are_those_of_transformers(name: str, how: str, peers) -> None:
    asked = prompts(8)
    ask(peers(name).folder, how, peers(name).greedy(asked, TOKENS), asked)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A DeepSeekMoE, and the greedy answers of its definition."""
    model = DeepSeek(DEEPSEEK)
    return model.save(tmp_path_factory.mktemp("model")), model.greedy(prompts(8), TOKENS)


@pytest.mark.parametrize("how", swept(SETTINGS, lambda how: [how] * (how in ("preempted, in chunks", "deterministic"))))
def test_greedy_tokens_of_deepseek_are_the_definitions(how: str, deepseek) -> None:
    folder, due = deepseek
    ask(folder, how, due, prompts(8))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek"])
def test_logprobs(name: str, peers, tmp_path: Path) -> None:
    model = DeepSeek(DEEPSEEK) if name == "deepseek" else peers(name).model
    folder = model.save(tmp_path) if name == "deepseek" else peers(name).folder
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    for output in LLM(folder, block_size=SIZE, **ROOM | {"max_batched_tokens": 11}).generate(prompts(4), params):
        (answer,), prompt = output.outputs, output.prompt_token_ids
        ids = torch.tensor(prompt + answer.token_ids)
        with torch.inference_mode():
            logits = model.logits(ids) if name == "deepseek" else model(ids[None]).logits[0]
        due = logits.double().log_softmax(-1)
        for place, each in enumerate(answer.logprobs, len(prompt) - 1):
            best, values = due[place].topk(3)[::-1]
            assert list(each)[:3] == best.tolist()
            assert [each[one].logprob for one in best.tolist()] == pytest.approx(values.tolist(), abs=1e-4)
        read = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
        assert read == pytest.approx([due[n, token].item() for n, token in enumerate(prompt[1:])], abs=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe, some dense", "olmoe", "gpt_oss"])
def test_a_prefix_is_found(name: str, peers) -> None:
    peer, prefix = peers(name), prompts(1, seed=3)[0] * 4
    asked = [prefix[:45], [*prefix[:40], 5, 6, 7], [*prefix[:33], 5, 6], prefix[:41]]
    llm, found = LLM(peer.folder, block_size=SIZE, **ROOM), []
    for prompt in asked:
        (output,) = llm.generate([prompt], GREEDY)
        assert [output.outputs[0].token_ids] == peer.greedy([prompt], TOKENS)
        found.append(output.num_cached_tokens)
        assert_clean(llm)
    assert found == [0, 40, 32, 40]


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "gpt_oss"])
def test_beams_and_forks(name: str, peers) -> None:
    peer, asked = peers(name), prompts(4, seed=5)
    llm = LLM(peer.folder, block_size=SIZE, max_model_len=96, num_blocks=26, max_batched_tokens=20)
    found = tokens_of(llm, asked, SamplingParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True))
    for prompt, answers in zip(asked, found, strict=True):
        assert answers == peer.generate([prompt], max_new_tokens=12, num_beams=3, num_return_sequences=2, do_sample=False)
    params = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
    (three,) = tokens_of(llm, asked[-1:], params)
    single = [SamplingParams(seed=11 + n, max_tokens=12, ignore_eos=True) for n in range(3)]
    assert three == [tokens_of(llm, asked[-1:], one)[0][0] for one in single]


@pytest.mark.parametrize(
    ("name", "dtype"), swept(product(("mixtral", "qwen3_moe", "gpt_oss"), ("bf16", "fp16")), lambda case: case)
)
def test_neighbours_change_no_bit_of_a_deterministic_engine(name: str, dtype: str, peers) -> None:
    asked, params = prompts(7), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
    found = []
    for settings in (ROOM, ROOM | {"max_batched_tokens": 9}, {"max_model_len": 96, "num_blocks": 18}):
        llm = LLM(peers(name).folder, dtype=dtype, deterministic=True, block_size=SIZE, **settings)
        outputs = llm.generate(asked, params)
        found.append([[each[token].logprob for token, each in zip(a.token_ids, a.logprobs, strict=True)]
                      for output in outputs for a in output.outputs])  # fmt: skip
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("weights", ["w8", {"*self_attn*": "int8", "layers.0.mlp.*": "w8"}, {"*.down_proj": "fp8"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe, some dense", "qwen3_next", "deepseek_v3", "granitemoehybrid"])
def test_tokens_are_those_of_the_numbers_that_codes_stand_for(name: str, weights, peers) -> None:
    """Formats whose activations stay in 16 bits; a decoder in memory is quantised as its folder is."""
    if name == "granitemoehybrid" and not isinstance(weights, str):
        weights = {"*.self_attn.*": "int8", "*.output_linear": "fp8"}
    asked, folder = prompts(6), peers(name).folder
    llm = LLM(folder, weights=weights, **ROOM)
    found = tokens_of(llm, asked, GREEDY)
    assert tokens_of(LLM(Decoder.from_folder(folder), weights=weights, **ROOM), asked, GREEDY) == found
    if weights != "w8":
        return
    plain = Decoder.from_folder(folder)
    for ours, rounded in zip(plain.layers, llm.engine.runner.decoder.layers, strict=True):
        for projection, its in zip(ours.projections, rounded.projections, strict=True):
            projection.weight.copy_(its.dequantised())
        for one in QUANTISED:
            if isinstance(codes := getattr(rounded.feed_forward, one, None), QuantisedWeight):
                place = getattr(ours.feed_forward, one)
                place.copy_(codes.dequantise().view_as(place))
    assert tokens_of(LLM(plain, **ROOM), asked, GREEDY) == found


@pytest.mark.parametrize(
    ("weights", "due"),
    [
        (
            "2:4",
            r'weights gives layers\.1\.mlp\.experts\.0\.gate_proj the format "2:4", which experts and what is beside them hav',
        ),
        ({"*.mlp.gate": "w8"}, "the pattern '\\*\\.mlp\\.gate', which matches no module"),
        ({"*.self_attn.x": "w8"}, "which matches no module"),
        ("int4:32", "gate_proj.weight cannot be quantised to int4:32|rows of K = 40 numbers, and 32 of int4 share a scale"),
    ],
)
def test_formats_that_experts_have_not(weights, due: str, peers) -> None:
    folder = peers("qwen3_moe, some dense").folder
    for model in (folder, Decoder.from_folder(folder)):
        with pytest.raises(InvalidInput, match=due) as refused:
            LLM(model, weights=weights, **ROOM)
        assert "\n" not in str(refused.value)


def test_sinks_are_not_left_out(peers) -> None:
    """By what approximates attention, or plans it without them."""
    folder = peers("gpt_oss").folder
    with pytest.raises(Unsupported, match="approximate is given and the model has attention sinks, which Loki leaves out; leave"):
        LLM(folder, approximate=LokiLayers([Loki.fit(torch.randn(50, 2, 16))] * 3), **ROOM)
    decoder = Decoder.from_folder(folder)
    with pytest.raises(Unsupported, match="the model has attention sinks, which Loki leaves out; calibrate a model without them"):
        calibrate(decoder, list(range(90)))
    config = decoder.config
    dense = replace(config, feed_forwards=("dense",) * 3, experts=None, ffn=32)
    with pytest.raises(Unsupported, match="the model has attention sinks, which a plan does not know; plan a model without"):
        rooftile.plan(Decoder.random(dense, torch.float32, "cpu"), rows={"decode": 1}, context=16)
    with pytest.raises(InvalidInput, match="layer 0 is native_sparse and the family gpt_oss has sinks; must have none"):
        replace(config, mixers=("native_sparse",) * 3, native_sparse=NativeSparseSizes())


def test_no_quantised_folder_is_written(tmp_path: Path) -> None:
    saved(theirs("olmoe"), tmp_path / "model")
    with pytest.raises(InvalidInput, match="the model has experts, which stay in 16 bits, and for which no layout is written"):
        quantise_folder(tmp_path / "model", tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
