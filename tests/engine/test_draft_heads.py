"""Heads of EAGLE-3 and layers of MTP, as they are published: their guesses are the formulas', and answers stay the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput, Unsupported
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.engine.draft_heads import DIM, HIDDEN, KEYS, LAYERS, MTP, EaglePair, MtpPair
from tests.engine.test_speculation import asked_params, told, whole

ALWAYS = {"num_speculative_tokens": 4, "max_batch": 1000}
SMALL = ROOM | {"max_num_seqs": 2, "max_batched_tokens": 24, "block_size": 8}
PREEMPTED, CHUNKS = {"max_model_len": 96, "num_blocks": 14}, ROOM | {"max_batched_tokens": 37}
Pair = EaglePair | MtpPair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            path = tmp_path_factory.mktemp("pair")
            family, _, kind = name.partition(", ")
            made[name] = EaglePair(path) if name == "eagle3" else MtpPair(path, family, kind=kind or None)
        return made[name]

    return pair


@pytest.fixture(scope="module")
def plain(pairs: Callable[[str], Pair]) -> Callable[[str], list[RequestOutput]]:
    """Answers without drafts; a folder with an MTP layer gives the answers of its decoder alone."""
    made: dict[str, list[RequestOutput]] = {}

    def answers(name: str) -> list[RequestOutput]:
        if name not in made:
            made[name] = LLM(pairs(name).folder, **ROOM).generate(prompts(26), asked_params(26))
        return made[name]

    return answers


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("eagle3", ROOM), ("eagle3", SMALL), ("mimo", SMALL), ("mimo, ct fp8, rows", ROOM), ("glm4_moe", ROOM),
        ("glm4_moe_lite", SMALL),
    ],
)  # fmt: skip
def test_guesses_are_those_of_the_formula(name: str, settings: dict[str, Any], pairs, monkeypatch) -> None:
    """At the beginning, after drafts that were refused in part, in chunks, and behind a prefix of another prompt."""
    pair = pairs(name)
    llm = LLM(pair.folder, speculative=ALWAYS | pair.asked, **settings)
    seen: list[tuple[list[int], list[int]]] = []
    drafter = llm.engine.speculator.drafter
    guess = drafter.guess

    known: list[list[int]] = []

    def watched(asked: Any, entries: Any) -> Any:
        found = guess(asked, entries)
        seen.extend((list(answer.ids), list(tokens)) for answer, tokens in found.items())
        # random weights guess nothing that stays: the first tokens are put right, from none to all
        for answer, tokens in found.items():
            right = next(row[len(answer.ids) :] for row in known if row[: len(answer.ids)] == answer.ids)
            count = min(len(answer.ids) % 5, len(right), len(tokens))
            tokens[:] = [*right[:count], *tokens[count:]]
        return {answer: list(tokens) for answer, tokens in found.items()}

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = [each for each in prompts(12) if len(each) > 1]
    asked = [*asked, *([*row[:40], 5, 6, 7] for row in asked)]
    known += whole(LLM(pair.folder, **ROOM).generate(asked, params))
    monkeypatch.setattr(drafter, "guess", watched)
    # prompts of the second half begin with blocks of the first half, in which the last pair had another token
    for each in (asked[: len(asked) // 2], asked[len(asked) // 2 :]):
        llm.generate(each, params)
    assert len(seen) > 60
    counts = llm.engine.speculator.counts
    assert 0.3 * counts["drafted"] < counts["accepted"] < 0.9 * counts["drafted"]
    assert sum(found == pair.guesses(ids, len(found)) for ids, found in seen) >= len(seen) - 1


@pytest.mark.parametrize(
    ("name", "settings", "ahead"),
    [
        ("eagle3", ROOM, False), ("eagle3", ROOM, True), ("eagle3", PREEMPTED, True), ("eagle3", CHUNKS, False),
        ("mimo", PREEMPTED, True), ("mimo", CHUNKS, False), ("glm4_moe_lite", ROOM, False),
    ],
)  # fmt: skip
def test_tokens_are_those_without_drafts(name: str, settings: dict[str, Any], ahead: bool, pairs, plain) -> None:
    pair = pairs(name)
    llm = LLM(pair.folder, speculative=ALWAYS | pair.asked, **settings)
    llm.engine._ahead = ahead
    assert told(llm.generate(prompts(26), asked_params(26))) == told(plain(name))
    assert llm.engine.speculator.counts["drafted"] > 50
    assert_clean(llm)


@pytest.mark.parametrize("name", MTP)
def test_every_guess_is_accepted_where_the_last_token_says_the_next(name: str, tmp_path: Path) -> None:
    """The halves of the projection, the embedding, the norms and the head are in their places, and draws have the same noise."""
    pair = MtpPair(tmp_path, name, follows=True)
    llm = LLM(pair.folder, speculative=ALWAYS | pair.asked, max_num_seqs=8, **ROOM)
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=20, ignore_eos=True) for n in range(8)]
    asked = [row for row in prompts(20) if len(row) > 1][:8]
    assert told(llm.generate(asked, params)) == told(LLM(pair.folder, **ROOM).generate(asked, params))
    counts = llm.engine.speculator.counts
    assert counts["accepted"] == counts["drafted"] >= 8 * 15
    # five tokens a step
    assert llm.engine.steps["steps"] <= 6


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"weights": "int8"}], ids=str)
def test_a_layer_of_mtp_beside(settings: dict[str, Any], pairs) -> None:
    pair = pairs("mimo")
    params = [SamplingParams(max_tokens=8, seed=n, logprobs=2, ignore_eos=True) for n in range(5)]
    due = LLM(pair.folder, **ROOM, **settings).generate(prompts(5), params)
    llm = LLM(pair.folder, speculative=ALWAYS | pair.asked, **ROOM, **settings)
    found = llm.generate(prompts(5), params)
    assert told(found) == told(due)
    if "deterministic" in settings:
        assert [output.outputs[0].logprobs for output in found] == [output.outputs[0].logprobs for output in due]
    assert llm.engine.speculator.counts["drafted"] > 20


def test_heads_of_eagle3_that_do_not_fit_are_refused(pairs, peers, tmp_path: Path) -> None:
    pair = pairs("eagle3")
    with pytest.raises(InvalidInput, match="is no head of EAGLE-3: name it as a draft model"):
        LLM(pair.folder, speculative={"method": "eagle3", "model": pair.folder}, **ROOM)
    with pytest.raises(InvalidInput, match="hidden_size 40; must be 32 for this model"):
        LLM(peers("gpt2").folder, speculative={"model": pair.head}, **ROOM)
    with pytest.raises(Unsupported, match="deterministic is True and a head of EAGLE-3"):
        LLM(pair.folder, speculative={"model": pair.head}, deterministic=True, **ROOM)
    for name, settings, said in (
        ("wide", {"vocab_size": 96}, "vocab_size 96; must be 97"),
        ("deep", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, r"reads the layers \[1, 2, 6\]; must"),
        ("other", {"draft_vocab_size": 59}, "lm_head.weight of the shape"),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        other = EaglePair(tmp_path / name, **settings)
        with pytest.raises(InvalidInput, match=said):
            LLM(pair.folder, speculative={"model": other.head}, **ROOM)


def test_layers_of_mtp_that_are_not_there_or_not_read_are_refused(pairs, peers, tmp_path: Path) -> None:
    def refused(given: Any, said: str, kind: type[Exception] = InvalidInput, **settings: Any) -> None:
        with pytest.raises(kind, match=said):
            LLM(given, speculative={"method": "mtp"} | settings, **ROOM)

    refused(peers("llama").folder, "family llama; layers of MTP are read from deepseek_v3, glm4_moe,", Unsupported)
    refused(peers("qwen3_next").folder, "layers of the kind 'delta', which cannot take back", Unsupported)
    refused(pairs("mimo").folder, 'the method "mtp", which needs none', model="here")
    refused(pairs("mimo").folder, "longest = 3 and the method 'mtp', which looks nothing up", longest=3)
    refused(LLM(pairs("mimo").folder, **ROOM).engine.runner.decoder, "the model is in memory: give its folder")
    pair = MtpPair(tmp_path, "glm4_moe_lite")
    file = pair.folder / "model.safetensors"
    stored = load_file(file)
    own = "model.layers.3."

    def rewritten(changed: dict[str, torch.Tensor | None]) -> Path:
        save_file({name: x for name, x in (stored | changed).items() if x is not None}, file)
        return pair.folder

    refused(rewritten({name: None for name in stored if name.startswith(own)}), "has no layers of MTP")
    refused(rewritten({f"{own}hnorm.weight": None}), "lacks layers.3.hnorm.weight; download it again")
    refused(rewritten({f"{own}eh_proj.weight": torch.zeros(40, 79)}), r"of the shape \(40, 79\); must be \(40, 80\)")
    refused(rewritten({f"{own}more.weight": torch.zeros(2)}), "has model.layers.3.more.weight; no such layer")
    codes = stored[f"{own}eh_proj.weight"].to(torch.float8_e4m3fn)
    refused(rewritten({f"{own}eh_proj.weight": codes}), "in F8_E4M3, and its config.json names no quantisation")
    # without drafts no tensor of the layer is read
    LLM(pair.folder, **ROOM)


def test_it_is_said_that_one_layer_of_several_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = MtpPair(tmp_path, "deepseek_v3")
    file, config = pair.folder / "model.safetensors", pair.folder / "config.json"
    stored = load_file(file)
    more = {name.replace("layers.3.", "layers.4."): x.clone() for name, x in stored.items() if "layers.3." in name}
    save_file(stored | more, file)
    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(InvalidInput, match=r"has model.layers.4.*which its config.json has no place for"):
        LLM(pair.folder, **ROOM)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 2}))
    due = LLM(pair.folder, **ROOM).generate([[5, 6, 7]], params)
    with caplog.at_level(logging.WARNING):
        llm = LLM(pair.folder, speculative="mtp", **ROOM)
    assert "has 2 layers of MTP: the first one drafts every token" in caplog.text
    assert told(llm.generate([[5, 6, 7]], params)) == told(due)


@pytest.mark.parametrize("name", ["eagle3", "mimo"])
def test_a_head_takes_little_memory_beside_the_keys(name: str, pairs) -> None:
    pair = pairs(name)
    llm = LLM(pair.folder, speculative=pair.asked, **ROOM)
    keys = 2 * KEYS * DIM * 4
    assert "of features" in str(llm.caches)
    plane, layers = (600 + 1) * 16 * HIDDEN * 4, LAYERS if name == "eagle3" else 3
    assert llm.caches.nbytes == 600 * 16 * (layers + 1) * keys + plane
