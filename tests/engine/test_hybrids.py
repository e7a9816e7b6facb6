"""Decoders of our own in the engine: tokens are the trained module's, whatever mixes tokens and however steps are cut."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.sampling.sampler import SamplingFeatures
from rooftile.errors import Unsupported
from rooftile.models import Decoder, ExpertSizes, LinearSizes, Mamba2Sizes, ModelConfig, PerformerSizes, TrainableDecoder
from rooftile.models.rotary import Rotary
from rooftile.moe import Router
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts, tokens_of
from tests.grids import swept
from tests.models.checkpoints import VOCABULARY
from tests.models.test_trainable import SMALL

# tokens per block of the cache
SIZE = 8
EXPERTS = {"name": "experts", "experts": 6, "active": 2, "hidden": 12, "shared": 1}


def mixer(name: str, **options: object) -> dict:
    return {"name": name, **SMALL.get(name, {}), **options}


MODELS = {
    "linear": {"mixers": mixer("linear")},
    "linear, relu": {"mixers": mixer("linear", feature="relu")},
    "performer": {"mixers": mixer("performer", seed=3)},
    "performer, hyperbolic": {"mixers": mixer("performer", kind="hyperbolic")},
    "performer, trigonometric": {"mixers": mixer("performer", kind="trigonometric", m=64)},
    "performer, relu": {"mixers": mixer("performer", kind="relu")},
    "mamba": {"mixers": mixer("mamba"), "feed_forwards": None},
    "mamba2": {"mixers": mixer("mamba2"), "feed_forwards": None},
    "delta": {"mixers": mixer("delta")},
    "experts": {"mixers": "attention", "feed_forwards": EXPERTS},
    "experts, grouped": {
        "mixers": "attention", "feed_forwards": ["dense", EXPERTS | {
            "active": 3, "score": "sigmoid", "normalise": True, "scale": 1.5, "groups": 3, "active_groups": 2, "shared": 0,
            "group_score": "sum of best two", "selection_bias": True, "activation": "clamped",
        }],
    },
    "hybrid": {"mixers": [mixer("mamba2"), "attention", mixer("linear")], "feed_forwards": [None, "dense", EXPERTS], "layers": 3},
    "all": {
        "mixers": ["attention", *map(mixer, ("mamba", "performer", "native_sparse", "delta", "mamba2", "linear"))], "layers": 7,
        "feed_forwards": ["dense", None, EXPERTS, "dense", EXPERTS, None, "dense"],
    },
}  # fmt: skip
MIXED = ["linear", "performer", "hybrid", "all"]
SETTINGS = {
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "chunks of one": ROOM | {"max_batched_tokens": 1, "max_num_seqs": 4},
    "preempted": {"max_model_len": 96, "num_blocks": 20},
    "preempted, in chunks": {"max_model_len": 96, "num_blocks": 16, "max_batched_tokens": 10},
    "three at once": ROOM | {"max_num_seqs": 3},
    "no prefixes": ROOM | {"enable_prefix_caching": False},
}


class Trained:
    """A decoder with weights so large that the tokens of a text differ, and its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = TrainableDecoder(VOCABULARY, **{"hidden": 32, "heads": 4, "kv_heads": 2, "max_len": 128} | MODELS[name])
        self.folder = folder
        with torch.no_grad():
            for one, weight in self.model.named_parameters():
                if weight.ndim > 1 and not one.endswith("A_log"):
                    weight.mul_(2.0)
        self.model.eval().save(folder)

    @torch.no_grad()
    def likeliest(self, prompt: list[int], answer: list[int]) -> list[int]:
        """The most likely token at each place of an answer, by one pass of the trained module over all tokens."""
        return self.model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Trained] = {}

    def one(name: str) -> Trained:
        if name not in made:
            made[name] = Trained(name, tmp_path_factory.mktemp("model"))
        return made[name]

    return one


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_trained_module(name: str, trained) -> None:
    peer, asked = trained(name), prompts(6)
    answers = tokens_of(LLM(peer.folder, block_size=SIZE, **ROOM), asked, GREEDY)
    for prompt, (answer,) in zip(asked, answers, strict=True):
        assert peer.likeliest(prompt, answer) == answer
    assert len({token for (answer,) in answers for token in answer}) > 20


# the mixture of all layers runs in every way, and each kind of its own with a preemption and without
@pytest.mark.parametrize(
    ("name", "how"),
    swept(product(MIXED, SETTINGS), lambda case: (case[0] == "all" and case[1], (case[0], "preempted" in case[1]))),
)
def test_tokens_depend_on_no_schedule(name: str, how: str, trained) -> None:
    peer, asked = trained(name), prompts(8)
    llm = LLM(peer.folder, block_size=SIZE, **SETTINGS[how])
    llm.engine._ahead = how == "preempted"
    for prompt, (answer,) in zip(asked, tokens_of(llm, asked, GREEDY), strict=True):
        assert peer.likeliest(prompt, answer) == answer
    assert (llm.engine.scheduler.preemptions > 0) == ("preempted" in how)


@pytest.mark.parametrize("name", MIXED)
def test_a_prefix_is_found_with_its_sums(name: str, trained) -> None:
    peer, prefix = trained(name), prompts(1, seed=3)[0] * 4
    asked = [prefix[:45], [*prefix[:40], 5, 6, 7], prefix[:41], prefix[:45]]
    llm, found = LLM(peer.folder, block_size=SIZE, **ROOM), []
    for prompt in asked:
        (output,) = llm.generate([prompt], GREEDY)
        assert peer.likeliest(prompt, output.outputs[0].token_ids) == output.outputs[0].token_ids
        found.append(output.num_cached_tokens)
        assert_clean(llm)
    assert found == [0, 40, 40, 40]


@pytest.mark.parametrize("name", MIXED)
def test_forks_are_answers_of_their_own(name: str, trained) -> None:
    prompt = (prompts(3)[2] * 8)[:21]
    params = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
    (found,) = tokens_of(LLM(trained(name).folder, block_size=SIZE, **ROOM), [prompt], params)
    single = [SamplingParams(seed=11 + n, max_tokens=12, ignore_eos=True) for n in range(3)]
    assert found == [tokens_of(LLM(trained(name).folder, block_size=SIZE, **ROOM), [prompt], one)[0][0] for one in single]
    assert len({tuple(row) for row in found}) == 3


@pytest.mark.parametrize("name", ["linear", "performer, hyperbolic"])
def test_rows_that_pad_a_step_change_the_sums_of_no_answer(name: str, trained) -> None:
    llm = LLM(trained(name).folder, block_size=SIZE, **ROOM | {"max_num_seqs": 4})
    runner, due = llm.engine.runner, {}
    for kind, memory in runner.caches.states.memory.items():
        memory.copy_(1 + torch.arange(memory.numel()).view(memory.shape) % 7 / 10)
        due[kind] = memory.clone()
    inputs = torch.tensor([[5, 0, 0], [9, -1, -1], [2, runner.pad_slot, runner.pad_slot]])
    with torch.inference_mode():
        runner._decode(inputs, SamplingFeatures(), None)
    for kind, memory in runner.caches.states.memory.items():
        changed = (memory != due[kind]).flatten(2).any(-1) if memory.ndim > 2 else memory != due[kind]
        others = [row for row in range(memory.shape[1]) if row not in (2, runner.pad_slot)]
        assert not changed[:, others].any()
        assert changed[:, 2].all() or kind == "performer exponents"


def test_a_key_far_below_others_is_the_first_of_a_sequence(tmp_path: Path) -> None:
    """Performer's features are relative to the largest exponent so far: none, and not 0, before the first token."""
    torch.manual_seed(0)
    model = TrainableDecoder(VOCABULARY, hidden=32, heads=2, layers=1, mixers=mixer("performer"), max_len=128)
    with torch.no_grad():
        # |k|^2 / 2 is some hundreds, so every exponent is far below the smallest number of fp32
        model.layers[0].mixer.k.weight.mul_(60.0)
    model.save(tmp_path)
    for prompt, (answer,) in zip(asked := prompts(3), tokens_of(LLM(tmp_path, **ROOM), asked, GREEDY), strict=True):
        with torch.no_grad():
            assert model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_says_what_the_module_is(name: str, trained) -> None:
    peer = trained(name)
    config = ModelConfig.from_folder(peer.folder)
    assert config == peer.model.config
    assert config.family == "rooftile"
    loaded = TrainableDecoder.load(peer.folder)
    tokens = torch.tensor([prompts(1)[0]])
    torch.testing.assert_close(loaded.eval()(tokens), peer.model(tokens), atol=0, rtol=0)
    assert len(list(Decoder.from_folder(peer.folder).tensors())) == len(list(peer.model.tensors()))


def test_sums_in_bf16_are_refused(trained) -> None:
    with pytest.raises(Unsupported, match='state_dtype is "bf16" and the model has linear layers; their sums grow with the text'):
        LLM(trained("linear").folder, **ROOM, state_dtype="bf16")


BESIDE = ("in chunks", "preempted, in chunks", "three at once")
SAME_BITS = ("linear", "performer", "performer, trigonometric", "hybrid", "experts, grouped")


# the hybrid runs in every way, the others with a preemption
@pytest.mark.parametrize(
    ("name", "ways"),
    swept(
        [(name, ways) for name in SAME_BITS for ways in (BESIDE[1:2], BESIDE)],
        lambda case: [case] * ((case[0] == "hybrid") == (case[1] == BESIDE)),
    ),
    ids=str,
)
def test_answers_are_the_same_bits_whatever_runs_beside_them(name: str, ways: tuple[str, ...], trained) -> None:
    peer, asked = trained(name), prompts(8)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    settings = {"block_size": SIZE, "deterministic": True}
    alone = LLM(peer.folder, **settings, **ROOM, enable_prefix_caching=False)
    due = [alone.generate([prompt], params)[0].outputs[0] for prompt in asked]
    for prompt, answer in zip(asked, due, strict=True):
        assert peer.likeliest(prompt, answer.token_ids) == answer.token_ids
    for how in ways:
        llm = LLM(peer.folder, **settings | SETTINGS[how])
        for _ in range(2):
            outputs = llm.generate(asked, params)
            assert [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs] == [
                (answer.token_ids, answer.logprobs) for answer in due
            ]
        assert (llm.engine.scheduler.preemptions > 0) == ("preempted" in how)


def test_weights_in_few_bits(trained) -> None:
    """The projections of every mixer are quantised while they are read; features, decays and experts are not."""
    llm = LLM(trained("linear").folder, weights="int8", **ROOM)
    assert len(tokens_of(llm, prompts(3), GREEDY)[0][0]) == TOKENS


def test_a_hybrid_by_its_configuration_alone() -> None:
    """Random weights; Performer's projection has rows of the due lengths, and the decays are as before a training."""
    sizes = {"vocab_size": VOCABULARY, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "max_len": 128}
    config = ModelConfig(
        family="rooftile", layers=4, windows=(None,) * 4, rotary=Rotary(dim=8, theta=10_000.0), scale=8**-0.5, **sizes,
        mixers=("performer", "mamba2", "attention", "linear"), feed_forwards=("experts", None, "dense", "dense"),
        performer=PerformerSizes(m=24), linear=LinearSizes(), mamba2=Mamba2Sizes(heads=4, head_dim=8, state=6),
        experts=ExpertSizes(experts=4, hidden=16, router=Router(active=2)),
    )  # fmt: skip
    decoder = Decoder.random(config, "fp32", "cpu")
    rows = decoder.layers[0].projection
    assert rows.dtype == torch.float32
    assert 0.5 * 8**0.5 < float(rows.norm(dim=1).mean()) < 1.5 * 8**0.5
    asked = prompts(3)
    together = tokens_of(LLM(decoder, block_size=SIZE, **ROOM), asked, GREEDY)
    alone = LLM(decoder, block_size=SIZE, **ROOM | {"max_batched_tokens": 7})
    assert together == [tokens_of(alone, [prompt], GREEDY)[0] for prompt in asked]
