"""The engine's tokens are those of `generate` in Transformers, however requests are cut, mixed, preempted and shared."""

from __future__ import annotations

import json
import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rooftile.errors import InvalidInput, Unsupported
from rooftile.serve import output as telling
from rooftile.serve import runner
from rooftile.serve.llm import LLM
from rooftile.serve.sampling_params import SamplingParams
from tests.models.checkpoints import SMALL, VOCABULARY, saved
from tests.serve.folders import save

FAMILIES = ["llama", "llama, llama3", "mistral", "qwen2", "qwen2, windows", "qwen3", "gemma2", "gpt2"]
TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
ROOM = {"max_model_len": 96, "num_blocks": 600}


def prompts(count: int = 64, seed: int = 0) -> list[list[int]]:
    """Of mixed lengths around those of blocks, some of which begin alike."""
    rng = random.Random(seed)
    made = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 7, 15, 16, 17, 33, 48, 60]))] for _ in range(count)]
    for n in range(3, count, 5):
        made[n] = made[n - 1][:40] + made[n]
        del made[n][60:]
    return made


def tokens_of(llm: LLM, asked: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[list[int]]]:
    """All answers to each prompt; the engine is left clean."""
    outputs = llm.generate(asked, params)
    assert [output.error for output in outputs] == [None] * len(asked)
    assert [output.prompt_token_ids for output in outputs] == asked
    assert_clean(llm)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def assert_clean(llm: LLM) -> None:
    engine = llm.engine
    engine.pool.check()
    assert engine.pool.used_blocks == 0
    assert engine.idle
    assert sorted(engine.scheduler._slots) == list(range(engine.max_answers))


@pytest.mark.parametrize("ahead", [False, True], ids=["", "a step ahead"])
@pytest.mark.parametrize(
    "settings",
    [
        ROOM,
        ROOM | {"max_batched_tokens": 13},
        {"max_model_len": 96, "num_blocks": 14},
        ROOM | {"max_num_seqs": 3, "block_size": 8},
        ROOM | {"allocator": "contiguous", "num_blocks": 40},
        {"max_model_len": 96, "num_blocks": 9, "max_batched_tokens": 10, "block_size": 16},
    ],
    ids=["together", "in chunks", "preempted", "three at once", "contiguous", "preempted, in chunks"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str, settings: dict[str, Any], ahead: bool, peers) -> None:
    peer = peers(name)
    asked = prompts()
    due = peer.greedy(asked, TOKENS)
    llm = LLM(peer.folder, **settings)
    llm.engine._ahead = ahead
    assert tokens_of(llm, asked, GREEDY) == [[row] for row in due]
    assert (llm.engine.scheduler.preemptions > 0) == (settings["num_blocks"] < 20)
    # once more, with what the prefix index kept
    read = llm.engine.steps["tokens"]
    assert tokens_of(llm, asked[:20], GREEDY) == [[row] for row in due[:20]]
    again = llm.engine.steps["tokens"] - read
    if settings == ROOM:
        assert again < sum(map(len, asked[:20])) / 2 + 20 * TOKENS


@pytest.mark.parametrize("name", FAMILIES)
def test_one_by_one(name: str, peers) -> None:
    peer = peers(name)
    llm = LLM(peer.folder, **ROOM)
    for prompt, due in zip(prompts()[:8], peer.greedy(prompts(), TOKENS), strict=False):
        assert tokens_of(llm, [prompt], GREEDY) == [[due]]


def test_the_end_of_text_ends_an_answer(peers) -> None:
    """The token itself is in token_ids, as in Transformers; min_tokens puts it off."""
    peer = peers("llama")
    asked = prompts()
    due = peer.greedy(asked, TOKENS)
    end = due[0][4]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, stop_token_ids=[end])
    for ahead in (False, True):
        llm = LLM(peer.folder, **ROOM)
        llm.engine._ahead = ahead
        outputs = llm.generate(asked, params)
        for output, row in zip(outputs, due, strict=True):
            ends = [n for n, token in enumerate(row) if token in (end, 2)]
            kept = row[: ends[0] + 1] if ends else row
            (answer,) = output.outputs
            assert answer.token_ids == kept
            assert answer.finish_reason == ("stop" if ends else "length")
            assert answer.stop_reason == (end if ends and kept[-1] == end else None)
        later = llm.generate(asked[:1], SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=9, stop_token_ids=[end]))
        tokens = later[0].outputs[0].token_ids
        assert tokens[:4] == due[0][:4]
        assert end not in tokens[:9]
        assert 2 not in tokens[:9]
        assert_clean(llm)


def test_ends_of_text_that_are_no_tokens_are_none(peers, tmp_path) -> None:
    """-1 is written for no end of text at all."""
    folder = shutil.copytree(peers("llama").folder, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": [-1, VOCABULARY, 10**9]}))
    (folder / "generation_config.json").unlink()
    (prompt,) = prompts(1)
    # the last token of all must be the likeliest: it was -1
    params = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, logit_bias={VOCABULARY - 1: 100})
    assert tokens_of(LLM(folder, **ROOM), [prompt], params) == [[[VOCABULARY - 1] * TOKENS]]


def test_scores_of_a_prompt_are_not_all_there_at_once(peers, monkeypatch) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    asked = [prompt for prompt in prompts() if len(prompt) > 30][:4]
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    due = [output.prompt_logprobs for output in llm.generate(asked, params)]
    rows, logits = [], llm.engine.runner.decoder.logits
    monkeypatch.setattr(llm.engine.runner.decoder, "logits", lambda hidden: (rows.append(len(hidden)), logits(hidden))[1])
    monkeypatch.setattr(runner, "MOST_NUMBERS", 7 * VOCABULARY)
    found = [output.prompt_logprobs for output in llm.generate(asked, params)]
    assert max(rows) == 7
    for one, other in zip(found, due, strict=True):
        assert one[1:] == [
            {id_: (pytest.approx(logprob, abs=1e-5), rank) for id_, (logprob, rank) in told.items()} for told in other[1:]
        ]


def test_samples_depend_on_their_seed_only(peers) -> None:
    """Not on the batch, chunks, preemption or slots; the i-th of n has seed + i."""
    peer = peers("qwen2")
    asked = prompts(20)
    params = [
        SamplingParams(n=1 + n % 4, temperature=0.8, top_p=0.9, top_k=n % 7, seed=100 * n, max_tokens=TOKENS,
                       presence_penalty=0.5 * (n % 2), repetition_penalty=1.2 if n % 3 else 1.0, ignore_eos=True)
        for n in range(len(asked))
    ]  # fmt: skip
    free = tokens_of(LLM(peer.folder, **ROOM), asked, params)
    assert [len(answers) for answers in free] == [1 + n % 4 for n in range(len(asked))]
    assert len({tuple(answer) for answer in free[3]}) > 1
    for settings in ({"max_batched_tokens": 9, "num_blocks": 25}, {"allocator": "contiguous", "num_blocks": 30}):
        llm = LLM(peer.folder, **ROOM | settings)
        llm.engine._ahead = True
        assert tokens_of(llm, asked, params) == free
    for n in (3, 7):
        for i in range(params[n].n):
            alone = SamplingParams(
                temperature=0.8, top_p=0.9, top_k=n % 7, seed=100 * n + i, max_tokens=TOKENS, ignore_eos=True,
                presence_penalty=params[n].presence_penalty, repetition_penalty=params[n].repetition_penalty,
            )  # fmt: skip
            assert tokens_of(LLM(peer.folder, **ROOM), [asked[n]], alone) == [[free[n][i]]]


def test_a_preempted_request_may_be_complete_before_it_is_admitted_again(peers) -> None:
    """By the last token that was being computed of it."""
    params = [SamplingParams(n=1 + n % 3, max_tokens=1 + n % 20, seed=n, ignore_eos=True) for n in range(48)]
    llm = LLM(peers("llama").folder, max_model_len=96, num_blocks=14)
    due = tokens_of(llm, prompts(48), params)
    llm.engine._ahead = True
    assert tokens_of(llm, prompts(48), params) == due


def test_samples_share_the_blocks_of_their_prompt(peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM)
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    prompt = [n % VOCABULARY for n in range(60)]
    request = llm.engine.add(prompt, params)
    llm.engine.step()
    llm.engine.step()
    # three full blocks once, and a last one each
    assert llm.engine.pool.used_blocks == 3 + 4
    llm.engine.abort(request)
    assert_clean(llm)


def test_samples_that_come_back_share_their_prompt_again(peers) -> None:
    """Also when nothing of it is cached any more; their tokens are what they would have been."""
    peer = peers("llama")
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    prompt = [n % VOCABULARY for n in range(50)]
    due = tokens_of(LLM(peer.folder, **ROOM), [prompt], params)
    for budget in (8192, 20):
        llm = LLM(peer.folder, **ROOM | {"max_batched_tokens": budget})
        engine = llm.engine
        request = engine.add(prompt, params)
        while request.answers[0].generated < 4:
            engine.step()
        before = engine.pool.used_blocks
        engine.scheduler._preempt(request)
        engine.pool.forget_prefixes()
        assert engine.pool.used_blocks == 0
        while any(answer.behind > 1 for answer in request.answers):
            engine.step()
        assert engine.pool.used_blocks == before == 3 + 3
        engine.pool.check()
        while not engine.idle:
            engine.step()
        assert [answer.ids[50:] for answer in request.answers] == due[0]


@pytest.mark.parametrize("settings", [ROOM, ROOM | {"num_blocks": 30, "max_batched_tokens": 20}], ids=["", "preempted"])
@pytest.mark.parametrize(("width", "penalty", "early"), [(2, 1.0, False), (4, 0.0, True), (3, 2.0, False), (5, -1.0, True)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_beams_are_those_of_transformers(name: str, width: int, penalty: float, early: bool, settings, peers) -> None:
    peer = peers(name)
    asked = prompts(8, seed=5)
    llm = LLM(peer.folder, **settings)
    llm.engine._ahead = True
    params = SamplingParams(
        n=2, beam_width=width, length_penalty=penalty, early_stopping=early, max_tokens=12, stop_token_ids=list(range(10, 20))
    )
    found = tokens_of(llm, asked, params)
    for prompt, answers in zip(asked, found, strict=True):
        due = peer.generate(
            [prompt], max_new_tokens=12, num_beams=width, num_return_sequences=2, length_penalty=penalty, early_stopping=early,
            do_sample=False, eos_token_id=[2, *range(10, 20)],
        )  # fmt: skip
        ends = {2, *range(10, 20)}
        cut = [row[: next((n + 1 for n, token in enumerate(row) if token in ends), len(row))] for row in due]
        assert answers == cut


def test_beams_of_a_least_length_are_those_of_transformers(peers) -> None:
    """What may not end yet keeps the model's probability, in tokens, scores and logprobs alike."""
    peer, ends = peers("llama"), [2, *range(10, 25)]
    llm = LLM(peer.folder, **ROOM)
    params = SamplingParams(n=2, beam_width=3, min_tokens=4, max_tokens=9, stop_token_ids=ends)
    for prompt in prompts(12, seed=6):
        ids = torch.tensor([prompt])
        settings = transformers.GenerationConfig(
            max_new_tokens=9, min_new_tokens=4, num_beams=3, num_return_sequences=2, do_sample=False, eos_token_id=ends,
            pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        due = peer.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        found = llm.generate(prompt, params)[0].outputs
        rows = [row[len(prompt) :].tolist() for row in due.sequences]
        cut = [row[: next((n + 1 for n, token in enumerate(row) if token in ends), len(row))] for row in rows]
        assert [answer.token_ids for answer in found] == cut
        assert [answer.score for answer in found] == pytest.approx(due.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("least", [0, 6])
def test_logprobs_are_those_of_the_model(least: int, peers) -> None:
    peer = peers("gemma2")
    asked = prompts(6)
    llm = LLM(peer.folder, **ROOM | {"max_batched_tokens": 21})
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=9, min_tokens=least, logprobs=3, prompt_logprobs=2, ignore_eos=not least
    )
    outputs = llm.generate(asked, params)
    for prompt, output in zip(asked, outputs, strict=True):
        (answer,) = output.outputs
        ids = torch.tensor([prompt + answer.token_ids])
        with torch.inference_mode():
            due = peer.model(ids, attention_mask=torch.ones_like(ids)).logits[0].float().log_softmax(-1)
        assert answer.logprobs is not None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        shown = [*output.prompt_logprobs[1:], *answer.logprobs]
        for place, (told, count) in enumerate(zip(shown, [2] * (len(prompt) - 1) + [3] * len(answer.token_ids), strict=True)):
            row, token = due[place], int(ids[0, place + 1])
            assert told is not None
            assert set(told) == {*row.topk(count).indices.tolist(), token}
            for id_, logprob in told.items():
                assert logprob.logprob == pytest.approx(row[id_].item(), abs=1e-4)
                assert logprob.rank == 1 + int((row > row[id_]).sum())
        total = sum(told[token].logprob for told, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total)


def test_answers_grow_in_a_stream(peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM)
    asked = prompts(5)
    seen: dict[int, list[int]] = {n: [] for n in range(5)}
    for place, output in llm.stream(asked, GREEDY):
        (answer,) = output.outputs
        assert answer.token_ids[: len(seen[place])] == seen[place]
        assert len(answer.token_ids) == len(seen[place]) + 1
        seen[place] = answer.token_ids
    assert list(seen.values()) == peer.greedy(asked, TOKENS)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "a step ahead"])
@pytest.mark.parametrize("failing", ["run", "wait"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_fails_leaves_nothing(at: int, failing: str, ahead: bool, peers, monkeypatch) -> None:
    """No block, no slot, and no prefix that was never written."""
    peer, asked = peers("llama"), [prompt for prompt in prompts() if len(prompt) > 16][:4]
    llm = LLM(peer.folder, **ROOM)
    llm.engine._ahead = ahead
    owner = llm.engine.runner if failing == "run" else runner.Result
    whole, fates = getattr(owner, failing), iter([*[False] * (at - 1), True])

    def fail(*given):
        if next(fates):
            raise KeyboardInterrupt
        return whole(*given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(asked, GREEDY)
    assert_clean(llm)
    assert tokens_of(llm, asked, GREEDY) == [[row] for row in peer.greedy(asked, TOKENS)]


def test_streams_take_turns(peers) -> None:
    """One inside of the other, and one that is left in the middle while another goes on."""
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM)
    asked = prompts(6)
    due = peer.greedy(asked, TOKENS)
    for ahead in (False, True):
        llm.engine._ahead = ahead
        outer: dict[int, list[int]] = {}
        left = llm.stream(asked[4:], GREEDY)
        next(left)
        for place, output in llm.stream(asked[:2], GREEDY):
            outer[place] = output.outputs[0].token_ids
            if len(outer[place]) == 3:
                inner = llm.generate(asked[2:4], GREEDY)
                assert [one.outputs[0].token_ids for one in inner] == due[2:4]
        assert [outer[place] for place in (0, 1)] == due[:2]
        latest = dict(left)
        assert [latest[place].outputs[0].token_ids for place in (0, 1)] == due[4:]
        assert all(output.finished for output in latest.values())
        # a request of somebody who uses the engine itself
        request = llm.engine.add(asked[0], GREEDY)
        assert llm.generate(asked[1:2], GREEDY)[0].outputs[0].token_ids == due[1]
        while not llm.engine.idle:
            llm.engine.step()
        assert request.answers[0].ids[len(asked[0]) :] == due[0]
        assert_clean(llm)


def test_what_a_stream_has_told_is_not_made_again(peers, monkeypatch) -> None:
    """And what a caller does to its lists is its own affair."""
    llm = LLM(peers("llama").folder, **ROOM)
    prompt = [n % VOCABULARY for n in range(40)]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    made, shown = [], telling._shown
    monkeypatch.setattr(telling, "_shown", lambda *given: (made.append(given), shown(*given))[1])
    seen = [found for _, found in llm.stream(prompt, params)]
    assert len(made) == 39 + 40
    (due,) = llm.generate(prompt, params)
    for n, found in enumerate(seen, 1):
        (answer,) = found.outputs
        assert answer.token_ids == due.outputs[0].token_ids[:n]
        assert answer.logprobs == due.outputs[0].logprobs[:n]
        assert (found.prompt_token_ids, found.prompt_logprobs) == (prompt, due.prompt_logprobs)
    stream = llm.stream(prompt, params)
    _, first = next(stream)
    first.prompt_token_ids.clear()
    first.outputs[0].token_ids.clear()
    first.outputs[0].logprobs.clear()
    assert [found for _, found in stream][-1].outputs == due.outputs


def test_a_search_that_goes_on_shows_as_many_beams_as_come_back(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    params = SamplingParams(beam_width=4, n=2, max_tokens=8, ignore_eos=True)
    assert {len(found.outputs) for _, found in llm.stream(prompts(1), params)} == {2}


def test_a_stream_that_is_left_leaves_nothing(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    llm.engine._ahead = True
    stream = llm.stream(prompts(5), GREEDY)
    next(stream)
    stream.close()
    while not llm.engine.idle:
        llm.engine.step()
    assert_clean(llm)


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], GREEDY, "the prompt has no token"),
        ([3, VOCABULARY], GREEDY, f"the prompt has {VOCABULARY} for a token; the model has 0 to {VOCABULARY - 1}"),
        ([3, -1], GREEDY, "the prompt has -1 for a token"),
        ([3, "x"], GREEDY, "the prompt has 'x' for a token"),
        ([1] * 96, GREEDY, "the prompt has 96 tokens, and a sequence at most 96, one of them for the answer"),
        ([1], SamplingParams(n=9), "9 answers at once are asked for; at most 8 run here"),
        ([1], SamplingParams(stop_token_ids=[VOCABULARY]), f"stop_token_ids names token {VOCABULARY}"),
        ([1] * 60, SamplingParams(n=8, max_tokens=36), "60 tokens of prompt and 8 x 36 of answers take 27 blocks"),
        ("text", GREEDY, "the prompt is text and the model has no tokenizer"),
        (None, GREEDY, "the prompt is 'None', of type NoneType; must be a list of token ids"),
        (5.0, GREEDY, "the prompt is '5.0', of type float; must be a list of token ids"),
        (b"text", GREEDY, "the prompt is \"b'text'\", of type bytes; must be a list of token ids"),
        ([[1]], GREEDY, "the prompt has [1] for a token"),
        ([True], GREEDY, "the prompt has True for a token"),
        ({"prompt_token_ids": [1], "images": []}, GREEDY, "the prompt has 'prompt_token_ids', 'images'; must have 'prompt' or"),
        ({"cache_salt": "a"}, GREEDY, "the prompt has 'cache_salt'; must have 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, GREEDY, "the salt is 5; must be a string"),
        ([1], {"n": 1}, "the sampling parameters are {'n': 1}; must be SamplingParams"),
    ],
)
def test_a_bad_request_fails_alone(prompt, params: SamplingParams, sentence: str, peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, max_model_len=96, num_blocks=20, max_num_seqs=8)
    good = prompts(3)
    outputs = llm.generate([good[0], prompt, good[1]], [GREEDY, params, GREEDY])
    due = peer.greedy(good, TOKENS)
    assert [output.outputs[0].token_ids for output in (outputs[0], outputs[2])] == due[:2]
    assert outputs[1].error is not None
    assert outputs[1].error.startswith(sentence)
    assert outputs[1].outputs == []
    assert_clean(llm)


@pytest.mark.parametrize(
    ("asked", "params", "sentence"),
    [
        (5, None, "prompts is 5; must be a text, a list of token ids, or a list of such prompts"),
        (None, None, "prompts is None; must be a text"),
        ([[1]], 5, "sampling_params is 5; must be SamplingParams, or a list of them"),
        ([[1]], {"n": 1}, "sampling_params is {'n': 1}; must be SamplingParams"),
        ([[1]], [], "there are 0 sampling_params for 1 prompts"),
    ],
)
def test_what_is_no_list_of_prompts(asked, params, sentence: str, peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    for call in (llm.generate, lambda *given: list(llm.stream(*given))):
        with pytest.raises(InvalidInput) as raised:
            call(asked, params)
        assert str(raised.value).startswith(sentence)
    assert_clean(llm)


def test_prompts_in_arrays_and_dictionaries(peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM)
    (prompt,) = prompts(1)
    due = peer.greedy([prompt], TOKENS)
    for asked in (np.array(prompt), torch.tensor(prompt), tuple(prompt), {"prompt_token_ids": prompt}, iter(prompt)):
        (output,) = llm.generate(asked, GREEDY)
        assert (output.prompt_token_ids, [answer.token_ids for answer in output.outputs]) == (prompt, due)
        assert {type(token) for token in output.prompt_token_ids} == {int}
    several = [list(np.array(prompt)), torch.tensor(prompt), {"prompt_token_ids": np.array(prompt), "cache_salt": None}]
    assert [output.outputs[0].token_ids for output in llm.generate(several, GREEDY)] == due * 3


def test_prefixes_are_shared_under_one_salt_only(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    one = SamplingParams(temperature=0, max_tokens=1)
    prompt = [n % VOCABULARY for n in range(60)]
    read = []
    for salt in ("a", "b", "a", None, None):
        before = llm.engine.steps["tokens"]
        llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], one)
        read.append(llm.engine.steps["tokens"] - before)
    assert read == [60, 60, 12, 60, 12]


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"tensor_parallel_size": 2}, Unsupported, "tensor_parallel_size is 2; has 1"),
        ({"kv_dtype": "fp4"}, Unsupported, "kv_dtype is 'fp4'; has"),
        ({"allocator": "buddy"}, InvalidInput, "allocator is 'buddy'"),
        ({"block_size": 12}, InvalidInput, "block_size is 12; must be a power of two of at least 8"),
        ({"max_model_len": 1000}, InvalidInput, "max_model_len is 1,000; the model has positions for 2 to 128"),
        ({"max_model_len": 96, "num_blocks": 5}, InvalidInput, "5 blocks of 16 are room for 80 tokens; a sequence may have 96"),
        ({"max_batched_tokens": 0}, InvalidInput, "max_batched_tokens is 0; must be a whole number of at least 1"),
        ({"num_blocks": -1}, InvalidInput, "num_blocks is -1; must be a whole number of at least 1"),
        ({"gpu_memory_utilization": 1.5}, InvalidInput, "gpu_memory_utilization is 1.5"),
    ],
)
def test_what_an_engine_cannot_be(settings: dict[str, Any], error: type[Exception], sentence: str, peers) -> None:
    with pytest.raises(error) as raised:
        LLM(peers("llama").folder, **settings)
    assert str(raised.value).startswith(sentence)


def test_a_decoder_is_what_it_is(peers) -> None:
    """What an LLM is told of its dtype and device beside it is not passed over."""
    decoder = LLM(peers("llama").folder, **ROOM).engine.runner.decoder
    assert LLM(decoder, dtype=torch.float32, device="cpu", **ROOM).engine.runner.decoder is decoder
    with pytest.raises(InvalidInput, match=r"dtype is torch.bfloat16 and the decoder's torch.float32; make it with that dtype"):
        LLM(decoder, dtype=torch.bfloat16, **ROOM)
    with pytest.raises(InvalidInput, match=r"device is meta and the decoder is on cpu; make it there"):
        LLM(decoder, device="meta", **ROOM)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_blocks": 40.0}, "num_blocks is 40.0; must be a whole number of at least 1"),
        ({"max_batched_tokens": "8"}, "max_batched_tokens is '8'; must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True; must be a whole number of at least 1"),
        ({"block_size": 16.0}, "block_size is 16.0; must be a power of two of at least 8"),
        ({"max_model_len": 64.5}, "max_model_len is 64.5; must be a whole number"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization is '0.9'; must be above 0 and at most 1"),
        ({"num_blocks": 10**14}, "no memory for a cache: 100,000,000,000,000 blocks (num_blocks) of 7,680 bytes take 768,"),
        ({"device": "gpu"}, "device is 'gpu'; must be a device of torch, such as"),
    ],
)
def test_settings_of_the_wrong_kind(settings: dict[str, Any], sentence: str, peers) -> None:
    with pytest.raises(InvalidInput) as raised:
        LLM(peers("llama").folder, **settings)
    assert str(raised.value).startswith(sentence)


def test_texts_and_stop_strings(tmp_path) -> None:
    """Of text prompts; a stop is found a step late, and what came after it is dropped, with its tokens."""
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420})
    saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    save("byte_level", tmp_path)
    for ahead in (False, True):
        llm = LLM(tmp_path, **ROOM)
        llm.engine._ahead = ahead
        assert llm.tokenizer is not None
        whole = llm.generate("cat", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0))[0]
        (answer,) = whole.outputs
        assert whole.prompt == "cat"
        assert whole.prompt_token_ids == llm.tokenizer.encode("cat")
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        middle = answer.text[5:8]
        assert len(middle) == 3
        at = answer.text.index(middle)
        for include in (False, True):
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0, stop=middle, include_stop=include)
            (cut,) = llm.generate("cat", params)[0].outputs
            assert cut.text == answer.text[: at + 3 * include]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", middle)
            assert cut.token_ids == answer.token_ids[: len(cut.token_ids)]
            assert len(llm.tokenizer.decode(cut.token_ids)) >= len(cut.text)
            assert cut.logprobs is not None
            assert len(cut.logprobs) == len(cut.token_ids) < 30
            assert cut.cumulative_logprob == pytest.approx(
                sum(told[token].logprob for told, token in zip(cut.logprobs, cut.token_ids, strict=True))
            )
        beams = SamplingParams(beam_width=2, max_tokens=5, ignore_eos=True)
        (best,) = llm.generate(["cat"], beams)[0].outputs
        assert best.text == llm.tokenizer.decode(best.token_ids)
        assert_clean(llm)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_in_fp8(name: str, peers) -> None:
    """Half the memory of 16 bits, and logprobs that are near; the same tokens however requests are cut and preempted."""
    peer = peers(name)
    asked = prompts(24)
    plain = LLM(peer.folder, **ROOM)
    llm = LLM(peer.folder, **ROOM, kv_dtype="fp8")
    assert llm.pages.storage.dtype == torch.float8_e4m3fn
    found = tokens_of(llm, asked, GREEDY)
    for settings in ({"max_batched_tokens": 13}, {"num_blocks": 14}):
        assert tokens_of(LLM(peer.folder, **ROOM | settings, kv_dtype="fp8"), asked, GREEDY) == found
    whole = [prompt + answers[0] for prompt, answers in zip(asked, found, strict=True)]
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    due, near = plain.generate(whole, ask), llm.generate(whole, ask)
    apart = [
        abs(x[token].logprob - y[token].logprob)
        for a, b, ids in zip(due, near, whole, strict=True)
        for x, y, token in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    # the weights here are large, so that rounding shows: and yet it is not lost
    assert 0 < sum(apart) / len(apart) < 0.1
