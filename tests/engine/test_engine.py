"""The engine's tokens are those of `generate` in Transformers, however requests are cut, mixed, preempted and shared."""

from __future__ import annotations

import json
import shutil
from itertools import product

import pytest
import torch
import transformers

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps import runner
from tests.engine.asking import FAMILIES, GREEDY, MORE_FAMILIES, ROOM, TOKENS, assert_clean, prompts, tokens_of
from tests.grids import swept
from tests.models.checkpoints import VOCABULARY

SETTINGS = {
    "together": ROOM,
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "preempted": {"max_model_len": 96, "num_blocks": 14},
    "three at once": ROOM | {"max_num_seqs": 3, "block_size": 8},
    "contiguous": ROOM | {"allocator": "contiguous", "num_blocks": 40},
    "preempted, in chunks": {"max_model_len": 96, "num_blocks": 9, "max_batched_tokens": 10, "block_size": 16},
}


def _traits(case: tuple[str, str, bool]) -> list:
    """`make test` runs each family in chunks, preempted, and a step ahead, and without; each setting a step ahead and not."""
    name, how, ahead = case
    if name in MORE_FAMILIES:
        return [name] if how == "preempted, in chunks" and ahead else []
    own = {"chunks": "chunks" in how, "preempted": "preempted" in how, "ahead": ahead}
    return [*((name, *trait) for trait in own.items()), (how, ahead)]


CASES = swept(product(FAMILIES + MORE_FAMILIES, SETTINGS, (False, True)), _traits)


@pytest.mark.parametrize(("name", "how", "ahead"), CASES, ids=str)
def test_greedy_tokens_are_those_of_transformers(name: str, how: str, ahead: bool, peers) -> None:
    peer, settings = peers(name), SETTINGS[how]
    asked = prompts(5 if name in MORE_FAMILIES else 24)
    due = peer.greedy(asked, TOKENS)
    llm = LLM(peer.folder, **settings)
    llm.engine._ahead = ahead
    assert tokens_of(llm, asked, GREEDY) == [[row] for row in due]
    assert (llm.engine.scheduler.preemptions > 0) == (settings["num_blocks"] < 20)
    # once more, with what the prefix index kept
    read = llm.engine.steps["tokens"]
    assert tokens_of(llm, asked[:8], GREEDY) == [[row] for row in due[:8]]
    again = llm.engine.steps["tokens"] - read
    if settings == ROOM:
        assert again < sum(map(len, asked[:8])) / 2 + 8 * TOKENS


@pytest.mark.parametrize("name", swept(FAMILIES + MORE_FAMILIES, lambda name: [name] if name in FAMILIES else []))
def test_one_by_one(name: str, peers) -> None:
    peer = peers(name)
    llm = LLM(peer.folder, **ROOM)
    for prompt, due in zip(prompts(5), peer.greedy(prompts(5), TOKENS), strict=True):
        assert tokens_of(llm, [prompt], GREEDY) == [[due]]


def test_the_end_of_text_ends_an_answer(peers) -> None:
    """The token itself is in token_ids, as in Transformers; min_tokens puts it off."""
    peer = peers("llama")
    asked = prompts(16)
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
    counted = lambda hidden, **how: (rows.append(len(hidden)), logits(hidden, **how))[1]  # noqa: E731
    monkeypatch.setattr(llm.engine.runner.decoder, "logits", counted)
    monkeypatch.setattr(runner, "MOST_NUMBERS", 7 * VOCABULARY)
    found = [output.prompt_logprobs for output in llm.generate(asked, params)]
    assert max(rows) == 7
    for one, other in zip(found, due, strict=True):
        assert one[1:] == [
            {id_: (pytest.approx(logprob, abs=1e-5), rank) for id_, (logprob, rank) in told.items()} for told in other[1:]
        ]


def test_samples_depend_on_their_seed_only(peers) -> None:
    """Not on the batch, chunks, preemption or slots; the i-th of n has seed + i."""
    peer = peers("llama")
    asked = prompts(12)
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
        for i in (0, params[n].n - 1):
            alone = SamplingParams(
                temperature=0.8, top_p=0.9, top_k=n % 7, seed=100 * n + i, max_tokens=TOKENS, ignore_eos=True,
                presence_penalty=params[n].presence_penalty, repetition_penalty=params[n].repetition_penalty,
            )  # fmt: skip
            assert tokens_of(LLM(peer.folder, **ROOM), [asked[n]], alone) == [[free[n][i]]]


def test_a_preempted_request_may_be_complete_before_it_is_admitted_again(peers) -> None:
    """By the last token that was being computed of it."""
    params = [SamplingParams(n=1 + n % 3, max_tokens=1 + n % 20, seed=n, ignore_eos=True) for n in range(32)]
    llm = LLM(peers("llama").folder, max_model_len=96, num_blocks=14)
    due = tokens_of(llm, prompts(32), params)
    llm.engine._ahead = True
    assert tokens_of(llm, prompts(32), params) == due


@pytest.mark.parametrize("prefixes", [True, False])
def test_no_step_copies_the_tokens_of_a_sequence(prefixes: bool, peers) -> None:
    class Watched(list[int]):
        def __getitem__(self, key):
            read.append(len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1)
            return super().__getitem__(key)

    read: list[int] = []
    llm = LLM(peers("llama").folder, **ROOM | {"enable_prefix_caching": prefixes})
    request = llm.engine.add([7] * 60, SamplingParams(max_tokens=30, ignore_eos=True))
    llm.engine.step()
    request.answers[0].ids = Watched(request.answers[0].ids)
    while not llm.engine.idle:
        llm.engine.step()
    # a full block at most, which is sealed
    assert 1 <= max(read) <= llm.engine.pool.size


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
        engine.scheduler._preempt(request, request.answers)
        engine.pool.forget_prefixes()
        assert engine.pool.used_blocks == 0
        while any(answer.unread > 1 for answer in request.answers):
            engine.step()
        assert engine.pool.used_blocks == before == 3 + 3
        engine.pool.check()
        while not engine.idle:
            engine.step()
        assert [answer.ids[50:] for answer in request.answers] == due[0]


BEAMS = [(2, 1.0, False), (4, 0.0, True), (3, 2.0, False), (5, -1.0, True)]


@pytest.mark.parametrize(
    ("name", "beams", "preempted"),
    swept(product(("llama", "gemma2", "gpt2"), BEAMS, (False, True)), lambda case: (case[0], case[1:])),
    ids=str,
)
def test_beams_are_those_of_transformers(name: str, beams: tuple[int, float, bool], preempted: bool, peers) -> None:
    peer, (width, penalty, early) = peers(name), beams
    settings = ROOM | {"num_blocks": 30, "max_batched_tokens": 20} if preempted else ROOM
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
    """A text that may not end yet keeps the model's probability, in tokens, scores and logprobs."""
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


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_in_fp8(name: str, peers) -> None:
    """Half the memory of 16 bits, and logprobs that are near; the same tokens however requests are cut and preempted."""
    peer = peers(name)
    asked = prompts(10)
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
