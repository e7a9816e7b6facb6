"""Loki in the engine: the tokens of a loop without a cache, however steps are cut, mixed, preempted and shared."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rooftile
from rooftile import approximate as ap
from rooftile.approximate.loki import definition
from rooftile.engine import LLM, SamplingParams
from rooftile.engine.mixers.exact.masks import masks_of
from rooftile.engine.mixers.loki.calibration import calibrate
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.reference import pairs
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder
from tests.engine.asking import GREEDY, ROOM, prompts, tokens_of
from tests.models.checkpoints import VOCABULARY

SIZE = 8
SETTINGS = {
    "together": ROOM,
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "preempted": {"max_model_len": 96, "num_blocks": 22},
    "three at once": ROOM | {"max_num_seqs": 3},
    "contiguous": ROOM | {"allocator": "contiguous", "num_blocks": 60},
}


@pytest.fixture(scope="module")
def calibrated(peers):
    """For each model its rotations, fitted to random tokens."""
    made: dict[str, ap.LokiLayers] = {}

    def loki_of(name: str) -> ap.LokiLayers:
        if name not in made:
            text = torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(5)).tolist()
            made[name] = calibrate(Decoder.from_folder(peers(name).folder), text, dims=0.3, keep=0.25, length=100)
        return made[name]

    return loki_of


def likeliest(decoder: Decoder, loki: ap.LokiLayers, prompt: list[int], answer: list[int]) -> list[int]:
    """The most likely token at each place of an answer, by one pass over all tokens without a cache.

    Prompt tokens are computed exactly; a token of the answer reads the pages of `chosen_pages`, by the definition.
    """
    ids = torch.tensor(prompt + answer)
    T, config, masks = len(ids), decoder.config, masks_of(decoder.config)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        exact = partial(rooftile.attention, scale=config.scale, softcap=config.softcap)
        o = exact(q[None], k[None], v[None], masks[layer])[0]
        if masks[layer] != rooftile.CAUSAL:
            return o
        for t in range(len(prompt), T):
            one, keys, values = q[None, t : t + 1], k[None, : t + 1], v[None, : t + 1]
            chosen = chosen_pages(loki.layers[layer], one, keys, config.scale, config.softcap)
            if config.softcap is None:
                o[t] = loki.layers[layer].attend(
                    one, keys, values, backend="eager", chosen=chosen, page=SIZE, scale=config.scale, unit="page"
                )[0, 0]
            else:
                seen = (chosen[..., None] == torch.arange(t + 1) // SIZE).any(-2).repeat_interleave(q.shape[1] // k.shape[1], 1)
                bias = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
                o[t] = exact(one, keys, values, bias=bias[:, :, None])[0, 0]
        return o

    with torch.inference_mode():
        hidden = decoder(ids, torch.arange(T), attend)
        return decoder.logits(hidden[len(prompt) - 1 : -1]).argmax(-1).tolist()


def chosen_pages(loki: ap.Loki, q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The pages (1, Hk, n) of one query, rising: the last one, and those with the largest weights in the leading dims."""
    x = definition.scores(loki.turn(q), loki.turn(k), loki.leading) * scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    p = torch.nn.functional.pad(torch.softmax(x, -1), (0, -x.shape[-1] % SIZE)).unflatten(-1, (-1, SIZE)).sum(-1)
    score = p.unflatten(1, (k.shape[2], -1)).sum(2)
    score[..., -1] = math.inf
    count = -(-math.ceil(loki.keep * k.shape[1]) // SIZE)
    return pairs.first_by_score(score, count).sort(-1).values.int()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_tokens_are_those_of_a_loop_without_a_cache(name: str, peers, calibrated) -> None:
    loki, folder = calibrated(name), peers(name).folder
    decoder = Decoder.from_folder(folder)
    asked = prompts(5)
    found = tokens_of(LLM(decoder, block_size=SIZE, approximate=loki, **ROOM), asked, GREEDY)
    for prompt, (answer,) in zip(asked, found, strict=True):
        assert likeliest(decoder, loki, prompt, answer) == answer
    # ... and they are not those of exact attention, in which nothing is left out
    exact = tokens_of(LLM(decoder, block_size=SIZE, **ROOM), asked, GREEDY)
    assert exact != found


@pytest.fixture(scope="module")
def alone(peers, calibrated) -> list[list[list[int]]]:
    """The answers to prompts that are read one by one."""
    llm = LLM(peers("llama").folder, block_size=SIZE, approximate=calibrated("llama"), **ROOM)
    return [tokens_of(llm, [prompt], GREEDY)[0] for prompt in prompts(9)]


@pytest.mark.parametrize("how", SETTINGS)
def test_tokens_depend_on_no_schedule(how: str, peers, calibrated, alone) -> None:
    """An answer that is computed again after a preemption is computed as before: its tokens choose pages again."""
    asked, given = prompts(9), {"block_size": SIZE, "approximate": calibrated("llama")}
    llm = LLM(peers("llama").folder, **given, **SETTINGS[how])
    llm.engine._ahead = how == "preempted"
    assert tokens_of(llm, asked, GREEDY) == alone
    assert (llm.engine.scheduler.preemptions > 0) == (how == "preempted")


def test_a_prefix_found_in_the_cache_changes_nothing(peers, calibrated) -> None:
    asked = prompts(1, seed=3)[0] * 4
    longer = [[*asked[:40], n] for n in range(3)]
    llm = LLM(peers("llama").folder, block_size=SIZE, approximate=calibrated("llama"), **ROOM)
    tokens_of(llm, [asked[:41]], GREEDY)
    outputs = llm.generate(longer, GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [40, 40, 40]
    decoder = llm.engine.runner.decoder
    for prompt, output in zip(longer, outputs, strict=True):
        # only the last token of the prompt is read, and it is a prompt's all the same
        answer = output.outputs[0].token_ids
        assert likeliest(decoder, calibrated("llama"), prompt, answer) == answer


def test_an_answer_is_no_prefix(peers, calibrated) -> None:
    """A prompt that continues an answer reads it exactly, as if nobody had asked before; its own prompt is found."""
    llm = LLM(peers("llama").folder, block_size=SIZE, approximate=calibrated("llama"), **ROOM)
    prompt = (prompts(1, seed=3)[0] * 40)[:33]
    ((answer,),) = tokens_of(llm, [prompt], GREEDY)
    (output,) = llm.generate([prompt + answer], GREEDY)
    assert output.num_cached_tokens == 32
    fresh = LLM(peers("llama").folder, block_size=SIZE, approximate=calibrated("llama"), **ROOM)
    assert [output.outputs[0].token_ids] == tokens_of(fresh, [prompt + answer], GREEDY)[0]


def test_forks_are_answers_of_their_own(peers, calibrated) -> None:
    """Two answers share the prompt's blocks, keys and leading dims; each has the tokens that it has alone."""
    llm = LLM(peers("llama").folder, block_size=SIZE, approximate=calibrated("llama"), **ROOM)
    several = SamplingParams(n=3, seed=11, max_tokens=20, ignore_eos=True)
    alone = [SamplingParams(seed=11 + n, max_tokens=20, ignore_eos=True) for n in range(3)]
    for prompt in prompts(2):
        (found,) = tokens_of(llm, [prompt], several)
        assert found == [tokens_of(llm, [prompt], one)[0][0] for one in alone]
        assert len({tuple(row) for row in found}) == 3


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(beam_width=3, n=3, max_tokens=10)], ids=["greedy", "beams"])
def test_with_every_key_kept_it_is_exact(params: SamplingParams, peers, calibrated) -> None:
    asked = prompts(5)
    for name in ("llama", "gemma2"):
        due = tokens_of(LLM(peers(name).folder, **ROOM), asked, params)
        whole = LLM(peers(name).folder, approximate=calibrated(name).replace(keep=1.0), **ROOM)
        assert tokens_of(whole, asked, params) == due


def test_a_calibration_is_the_fit_of_all_keys_at_once(peers) -> None:
    decoder = Decoder.from_folder(peers("llama").folder)
    tokens = torch.randint(VOCABULARY, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    keys: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        q, k = rotate(q, rotation), rotate(k, rotation)
        keys.append(k)
        return rooftile.attention(q[None], k[None], v[None], rooftile.CAUSAL)[0]

    for part in (tokens[:64], tokens[64:]):
        with torch.inference_mode():
            decoder(torch.tensor(part), torch.arange(len(part)), attend)
    found = calibrate(decoder, tokens, dims=0.5, keep=0.3, length=64)
    assert repr(found) == "LokiLayers(3 layers, 2 heads of 10, dims=0.5, keep=0.3)"
    for n, loki in enumerate(found.layers):
        due = ap.Loki.fit(torch.cat([keys[n], keys[n + 3]]))
        assert (loki.p - due.p).abs().max() < 1e-4


def test_a_file_keeps_everything(peers, calibrated, tmp_path: Path) -> None:
    loki, file = calibrated("llama"), tmp_path / "loki.pt"
    loki.save(file)
    again = ap.LokiLayers.load(file)
    assert repr(again) == repr(loki)
    assert all(torch.equal(one.p, other.p) for one, other in zip(loki.layers, again.layers, strict=True))
    asked = prompts(3)
    due = tokens_of(LLM(peers("llama").folder, approximate=loki, block_size=SIZE, **ROOM), asked, GREEDY)
    assert tokens_of(LLM(peers("llama").folder, approximate=str(file), block_size=SIZE, **ROOM), asked, GREEDY) == due
    assert "of leading dims" in str(LLM(peers("llama").folder, approximate=file, **ROOM).pages)


def test_the_model_is_known_again_in_another_dtype(peers, calibrated) -> None:
    LLM(peers("llama").folder, approximate=calibrated("llama"), dtype="bfloat16", **ROOM)


def test_what_does_not_fit_is_said(peers, calibrated, tmp_path: Path) -> None:
    loki, folder = calibrated("llama"), peers("llama").folder
    refused = partial(pytest.raises, InvalidInput)
    with refused(match=r"approximate has 3 layers of 2 key heads of 10; the model has 3 of 4 of 8: calibrate this model"):
        LLM(peers("gpt2").folder, approximate=loki, **ROOM)
    with refused(match=r"was fitted to another model, of the same sizes; calibrate this model"):
        LLM(peers("mistral").folder, approximate=ap.LokiLayers(loki.layers, sample=-loki.sample), **ROOM)
    with refused(match=r"approximate is 0\.25; must be rooftile\.approximate\.LokiLayers, or a file of `rooftile calibrate`"):
        LLM(folder, approximate=0.25, **ROOM)
    for given, words in (({"deterministic": True}, "deterministic are both given"), ({"kv_dtype": "fp8"}, 'kv_dtype is "fp8"')):
        with pytest.raises(Unsupported, match=words):
            LLM(folder, approximate=loki, **given, **ROOM)
    with refused(match=r"num_blocks is 99,999,999; may be at most 11,184,810 with approximate="):
        LLM(folder, approximate=loki, num_blocks=99_999_999)
    with refused(match=r"approximate is '.*missing\.pt', which is no file; give one of `rooftile calibrate`"):
        LLM(folder, approximate=tmp_path / "missing.pt", **ROOM)
    (tmp_path / "text.pt").write_text("no file")
    with refused(match=r"text\.pt is no file of `rooftile calibrate`"):
        LLM(folder, approximate=tmp_path / "text.pt", **ROOM)
    loki.layers[0].save(tmp_path / "one.pt")
    with refused(match=r"one\.pt is no file of `rooftile calibrate`, or one of another version"):
        LLM(folder, approximate=tmp_path / "one.pt", **ROOM)
    damaged = {"format": "rooftile loki layers 1", "p": torch.full((1, 2, 10, 10), torch.nan), "names": [""], "sample": None}
    torch.save(damaged | {"dims": 0.25, "keep": 0.25}, tmp_path / "nan.pt")
    with refused(match=r"nan\.pt is damaged: its rotations must be finite"):
        LLM(folder, approximate=tmp_path / "nan.pt", **ROOM)


def test_layers_that_do_not_go_together_are_refused() -> None:
    one, other = ap.Loki.fit(torch.randn(50, 2, 8)), ap.Loki.fit(torch.randn(50, 2, 8), keep=0.5)
    for layers, words in (
        ([], "must be a list of one Loki per layer"), ([one, other], "layer 1 has Loki"),
        ([ap.Loki.fit(torch.randn(50, 2, 8), rotated=False)], "rotated must be True"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=words):
            ap.LokiLayers(layers)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([1] * 9, "the text has 9 tokens; must have at least 10"), ([0, VOCABULARY] * 20, "has tokens from 0 to 97")],
)
def test_texts_that_calibrate_nothing_are_refused(tokens: list[int], words: str, peers) -> None:
    with pytest.raises(InvalidInput, match=words):
        calibrate(Decoder.from_folder(peers("llama").folder), tokens)


def test_samples_in_turn_are_those_of_samples_together(calibrated, peers) -> None:
    """The prompt's last token is read exactly each time, as a prompt's."""
    asked = [(prompts(3)[2] * 8)[:length] for length in (8, 24, 45)]
    params = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True)
    due, found = (
        tokens_of(LLM(peers("llama").folder, block_size=SIZE, approximate=calibrated("llama"), **ROOM | more), asked, params)
        for more in ({}, {"max_num_seqs": 2, "max_batched_tokens": 9})
    )
    assert found == due
