"""Heads of EAGLE-3 from a folder as they are published: what they guess is what their formula says, and answers stay the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput, Unsupported
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.engine.test_speculation import asked_params, told, whole
from tests.models.checkpoints import SMALL, THETA, VOCABULARY, saved

LAYERS, DRAFTED, HEADS, KEYS, DIM, HIDDEN = 6, 60, 4, 2, 10, 40
TAPS = (2, LAYERS // 2, LAYERS - 3)
ALWAYS = {"method": "eagle3", "num_speculative_tokens": 4, "max_batch": 1000}


class Pair:
    """A model of Transformers and a head for it, with random weights, in folders."""

    def __init__(self, path: Path, **settings: Any) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": LAYERS}, rope_parameters=THETA)
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.folder, self.head = saved(self.model, path / "model"), path / "head"
        self.model = self.model.double()
        wide = {"q": HEADS * DIM, "k": KEYS * DIM, "v": KEYS * DIM}
        shapes = {
            "fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,), "lm_head": (DRAFTED, HIDDEN), "midlayer.input_layernorm": (HIDDEN,),
            "midlayer.hidden_norm": (HIDDEN,), "midlayer.post_attention_layernorm": (HIDDEN,),
            **{f"midlayer.self_attn.{name}_proj": (rows, 2 * HIDDEN) for name, rows in wide.items()},
            "midlayer.self_attn.o_proj": (HIDDEN, HEADS * DIM), "midlayer.mlp.gate_proj": (48, HIDDEN),
            "midlayer.mlp.up_proj": (48, HIDDEN), "midlayer.mlp.down_proj": (HIDDEN, 48),
        }  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.weights = {f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for name in self.weights:
            if "norm" in name:
                self.weights[name] += 1
        self.tokens = torch.randperm(VOCABULARY, generator=generator)[:DRAFTED].sort().values
        known = torch.zeros(VOCABULARY, dtype=torch.bool)
        known[self.tokens] = True
        self.head.mkdir()
        save_file(self.weights | {"d2t": self.tokens - torch.arange(DRAFTED), "t2d": known}, self.head / "model.safetensors")
        own = config.to_dict() | {
            "num_hidden_layers": 1,
            "draft_vocab_size": DRAFTED,
            "architectures": ["LlamaForCausalLMEagle3"],
        }
        # published heads have fewer positions than their models
        own |= {"max_position_embeddings": 32} | settings
        (self.head / "config.json").write_text(json.dumps(own))

    @torch.no_grad()
    def guesses(self, ids: Sequence[int], count: int) -> list[int]:
        """The greedy guesses behind a sequence, in fp64 from the formula."""
        w = {name: weight.double() for name, weight in self.weights.items()}
        streams = self.model(torch.tensor([list(ids[:-1])]), output_hidden_states=True).hidden_states
        features = torch.cat([streams[n][0] for n in TAPS], 1) @ w["fc.weight"].T
        tokens, found = list(ids[1:]), list[int]()
        embedding = self.model.get_input_embeddings().weight
        for _ in range(count):
            e = normal(embedding[torch.tensor(tokens)], w["midlayer.input_layernorm.weight"])
            u = torch.cat((e, normal(features, w["midlayer.hidden_norm.weight"])), 1)
            q, k, v = (u @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
            q, k, v = (turned(q, HEADS), turned(k, KEYS), v.unflatten(1, (KEYS, DIM)))
            k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) / DIM**0.5
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
            mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
            g = features + mixed @ w["midlayer.self_attn.o_proj.weight"].T
            x = normal(g, w["midlayer.post_attention_layernorm.weight"])
            gated = silu(x @ w["midlayer.mlp.gate_proj.weight"].T) * (x @ w["midlayer.mlp.up_proj.weight"].T)
            g = g + gated @ w["midlayer.mlp.down_proj.weight"].T
            logits = normal(g[-1:], w["norm.weight"]) @ w["lm_head.weight"].T
            token = int(self.tokens[int(logits.argmax())])
            found.append(token)
            # the head's own numbers stand for the features of the token that it has guessed
            tokens.append(token)
            features = torch.cat((features, g[-1:]))
        return found


def normal(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, heads: int) -> Tensor:
    x = x.unflatten(1, (heads, DIM))
    angles = torch.arange(len(x)).double()[:, None] / THETA["rope_theta"] ** (torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    "settings", [ROOM, ROOM | {"max_num_seqs": 2, "max_batched_tokens": 24, "block_size": 8}], ids=["", "small"]
)
def test_guesses_are_those_of_the_formula(settings: dict[str, Any], pair: Pair, monkeypatch) -> None:
    """At the beginning, after drafts that were refused in part, in chunks, and behind a prefix of another prompt."""
    llm = LLM(pair.folder, speculative=ALWAYS | {"model": pair.head}, **settings)
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
    # those of the second half begin with blocks of the first, in which the last pair had another token
    for each in (asked[: len(asked) // 2], asked[len(asked) // 2 :]):
        llm.generate(each, params)
    assert len(seen) > 60
    counts = llm.engine.speculator.counts
    assert 0.3 * counts["drafted"] < counts["accepted"] < 0.9 * counts["drafted"]
    assert sum(found == pair.guesses(ids, len(found)) for ids, found in seen) >= len(seen) - 1


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [(ROOM, False), (ROOM, True), ({"max_model_len": 96, "num_blocks": 14}, True), (ROOM | {"max_batched_tokens": 37}, False)],
)
def test_tokens_are_those_without_drafts(settings: dict[str, Any], ahead: bool, pair: Pair) -> None:
    due = LLM(pair.folder, **ROOM).generate(prompts(26), asked_params(26))
    llm = LLM(pair.folder, speculative=ALWAYS | {"model": pair.head}, **settings)
    llm.engine._ahead = ahead
    assert told(llm.generate(prompts(26), asked_params(26))) == told(due)
    assert llm.engine.speculator.counts["drafted"] > 50
    assert_clean(llm)


def test_what_does_not_fit_is_refused(pair: Pair, peers, tmp_path: Path) -> None:
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
        other = Pair(tmp_path / name, **settings)
        with pytest.raises(InvalidInput, match=said):
            LLM(pair.folder, speculative={"model": other.head}, **ROOM)


def test_a_head_takes_little_memory_beside_the_keys(pair: Pair) -> None:
    llm = LLM(pair.folder, speculative={"model": pair.head}, **ROOM)
    keys = 2 * KEYS * DIM * 4
    assert "of features" in str(llm.caches)
    plane = (600 + 1) * 16 * HIDDEN * 4
    assert llm.caches.nbytes == 600 * 16 * (LAYERS + 1) * keys + plane
