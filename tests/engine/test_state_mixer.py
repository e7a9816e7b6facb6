"""A kind of layer that the engine has never heard of, with a state of a fixed size: all that it brings is in this file.

A decaying sum: S_t = a S_(t-1) + k_t v_t^T for each key head, and o_t = S_t^T q_t.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rooftile
from rooftile.approximate import Loki, LokiLayers
from rooftile.engine import LLM, EngineConfig, SamplingParams
from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers import registry
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.steps import state_plan
from rooftile.errors import Unsupported
from rooftile.exact.spec import CallSettings
from rooftile.fused.rope import Rotation, rotate
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec, State
from rooftile.models import Attend, Decoder, ModelConfig, mixers
from rooftile.models.config import config_of
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts, tokens_of
from tests.models.checkpoints import SMALL

DECAY = 0.8
# tokens per block of the cache
SIZE = 8
PATTERNS = {"all": ("decaying_sum",) * 3, "some": ("decaying_sum", "attention", "decaying_sum")}
SETTINGS = {
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "chunks of one": ROOM | {"max_batched_tokens": 1, "max_num_seqs": 4},
    "preempted": {"max_model_len": 96, "num_blocks": 20},
    "preempted, in chunks": {"max_model_len": 96, "num_blocks": 16, "max_batched_tokens": 10},
    "three at once": ROOM | {"max_num_seqs": 3},
    "contiguous": ROOM | {"allocator": "contiguous", "num_blocks": 60},
    "no prefixes": ROOM | {"enable_prefix_caching": False},
    "deterministic": ROOM | {"deterministic": True},
}


class DecayingSum(Mixer):
    """The mixer."""

    def specs(self) -> tuple[CacheSpec, ...]:
        return (State(self.layers, "sum", (self.shape.kv_heads, self.shape.head_dim, self.shape.head_dim)),)

    def begin(self, decoder: Decoder, caches: Caches, asked: CallSettings) -> None:
        assert caches.states is not None
        self.sums = caches.states.memory["sum"]

    def on(self, step: StepTokens) -> Attend:
        slots, positions, rounds = step.slots.tolist(), step.positions.tolist(), step.rounds()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
            sums, o, rows = self.sums[self.layers.index(layer)], torch.zeros_like(q), torch.arange(len(q))

            def read(some: Tensor, state: Tensor) -> None:
                for n in some.tolist():
                    if positions[n] >= 0:
                        state.mul_(DECAY).add_(k[n][:, :, None] * v[n][:, None])
                        o[n] = torch.einsum("hgd,hde->hge", q[n].unflatten(0, (k.shape[1], -1)), state).flatten(0, 1)

            # sequences begin with the states of some rows, and leave theirs in others
            for part in () if rounds is None else rounds.parts:
                states, cu = sums[part.slots], part.cu.tolist()
                for state, begin, end in zip(states, cu[:-1], cu[1:], strict=True):
                    read(rows[: step.split][part.rows][begin:end], state)
                sums.index_copy_(0, part.targets, states)
                part.keep(sums)
            for n in rows[step.split :]:
                read(n[None], sums[slots[int(n)]])
            return o

        return attend


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mixers.MIXERS, "decaying_sum", 1)
    monkeypatch.setitem(registry.MIXERS, "decaying_sum", DecayingSum)


def config_with(pattern: tuple[str, ...]) -> ModelConfig:
    """A Llama with other mixers, which no config.json can name."""
    return replace(config_of(SMALL | {"model_type": "llama", "head_dim": 8}, "here"), mixers=pattern)


@pytest.fixture(params=PATTERNS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A model with random weights, large enough that the tokens of a text differ."""
    made = Decoder(config_with(PATTERNS[request.param]), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    for name, place in made.tensors():
        place.copy_(0.3 * torch.randn(place.shape, generator=generator) + name.endswith("norm.weight"))
    return made


def logprobs(decoder: Decoder, prompt: list[int], answer: list[int]) -> Tensor:
    """The logprobs at each place of an answer, by one pass over all tokens: sums over pairs of tokens in fp64, and no state."""
    ids, scale = torch.tensor(prompt + answer), decoder.config.scale

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        if decoder.config.mixers[layer] == "attention":
            q, k = (x if rotation is None else rotate(x, rotation) for x in (q, k))
            return rooftile.attention(q[None], k[None], v[None], rooftile.CAUSAL, scale=scale)[0]
        age = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
        weight = torch.where(age >= 0, DECAY ** age.double(), 0.0)
        k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return torch.einsum("thd,shd,ts,she->the", q.double(), k, weight, v).to(q.dtype)

    with torch.inference_mode():
        hidden = decoder(ids, torch.arange(len(ids)), attend)
        return decoder.logits(hidden[len(prompt) - 1 : -1]).double().log_softmax(-1)


def likeliest(decoder: Decoder, prompt: list[int], answer: list[int]) -> list[int]:
    """The most likely token at each place of an answer."""
    return logprobs(decoder, prompt, answer).argmax(-1).tolist()


def test_tokens_are_those_of_one_pass_without_a_state(decoder: Decoder) -> None:
    asked = prompts(9)
    for prompt, (answer,) in zip(asked, tokens_of(LLM(decoder, block_size=SIZE, **ROOM), asked, GREEDY), strict=True):
        assert likeliest(decoder, prompt, answer) == answer
        assert len(set(answer)) > 5


@pytest.mark.parametrize("how", SETTINGS)
def test_tokens_depend_on_no_schedule(how: str, decoder: Decoder) -> None:
    llm = LLM(decoder, block_size=SIZE, **SETTINGS[how])
    llm.engine._ahead = "preempted" in how
    asked = prompts(9)
    for prompt, (answer,) in zip(asked, tokens_of(llm, asked, GREEDY), strict=True):
        assert likeliest(decoder, prompt, answer) == answer
    assert (llm.engine.scheduler.preemptions > 0) == ("preempted" in how)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 45])
def test_forks_are_answers_of_their_own(length: int, decoder: Decoder) -> None:
    """Answers fork in the middle of a block, or where one ends."""
    llm = LLM(decoder, block_size=SIZE, **ROOM)
    prompt = (prompts(3)[2] * 8)[:length]
    (found,) = tokens_of(llm, [prompt], SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True))
    single = [SamplingParams(seed=11 + n, max_tokens=12, ignore_eos=True) for n in range(3)]
    assert found == [tokens_of(LLM(decoder, block_size=SIZE, **ROOM), [prompt], one)[0][0] for one in single]
    assert len({tuple(row) for row in found}) == 3


def test_a_fork_outlives_the_answer_that_read_the_prompt(decoder: Decoder) -> None:
    """The first answer ends with its first token, so its slot is another's while those that forked from it go on."""
    prompt = (prompts(3)[2] * 8)[:20]
    params = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True)
    first = tokens_of(LLM(decoder, block_size=SIZE, **ROOM), [prompt], params)[0]
    llm = LLM(decoder, block_size=SIZE, **ROOM | {"max_num_seqs": 4})
    stopping = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True, stop_token_ids=[first[0][0]])
    found, others = tokens_of(llm, [prompt, prompts(4)[3]], [stopping, GREEDY])
    assert len(found[0]) == 1
    assert others == [likeliest(decoder, prompts(4)[3], others[0])]
    for stopped, whole in zip(found, first, strict=True):
        assert whole[: len(stopped)] == stopped


@pytest.mark.parametrize("more", [{}, {"max_batched_tokens": 5}, {"enable_prefix_caching": False}], ids=str)
def test_samples_in_turn_are_those_of_samples_together(more: dict, decoder: Decoder) -> None:
    """Those that begin later begin with a state that was kept, or read the prompt again."""
    asked = [(prompts(3)[2] * 8)[:length] for length in (8, 24, 45)]
    params = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True)
    due = tokens_of(LLM(decoder, block_size=SIZE, **ROOM), asked, params)
    assert tokens_of(LLM(decoder, block_size=SIZE, **ROOM | {"max_num_seqs": 2} | more), asked, params) == due


@pytest.mark.parametrize("room", [ROOM, {"max_model_len": 96, "num_blocks": 24}], ids=["", "preempted"])
def test_beams_take_the_states_of_their_parents(room: dict, decoder: Decoder) -> None:
    """The score of a beam is the sum of logprobs that one pass over its tokens finds."""
    llm = LLM(decoder, block_size=SIZE, **room)
    asked = prompts(6)
    outputs = llm.generate(asked, SamplingParams(beam_width=3, n=3, max_tokens=12))
    assert (llm.engine.scheduler.preemptions > 0) == ("num_blocks" in room and room["num_blocks"] < 100)
    for prompt, output in zip(asked, outputs, strict=True):
        for answer in output.outputs:
            found = logprobs(decoder, prompt, answer.token_ids)
            due = found.gather(1, torch.tensor(answer.token_ids)[:, None]).sum().item()
            assert answer.cumulative_logprob == pytest.approx(due, abs=1e-3)


def hits(llm: LLM, asked: list[list[int]]) -> list[int | None]:
    """Asks one prompt after the other; returns how many tokens of each the cache had, and checks the answers."""
    found = []
    for prompt in asked:
        (output,) = llm.generate([prompt], GREEDY)
        answer = output.outputs[0].token_ids
        assert likeliest(llm.engine.runner.decoder, prompt, answer) == answer
        llm.engine.check_idle()
        found.append(output.num_cached_tokens)
    return found


def test_a_prefix_is_found_with_its_state(decoder: Decoder) -> None:
    """A prompt of 45 tokens leaves states after 40, where the next begins: at the last end of a block that both have."""
    prefix = prompts(1, seed=3)[0] * 4
    longer = [[*prefix[:40], *range(n, 2 * n)] for n in (1, 4, 9)]
    llm = LLM(decoder, block_size=SIZE, **ROOM)
    assert hits(llm, [prefix[:45], *longer]) == [0, 40, 40, 40]
    # no state was kept after 32 tokens, so a prompt that leaves the prefix there is read anew
    assert hits(llm, [[*prefix[:33], 5, 6], prefix[:41], prefix[:40]]) == [0, 40, 32]
    # a prompt that ends with a block leaves the state before that block, too: no prefix covers a whole prompt
    assert hits(LLM(decoder, block_size=SIZE, **ROOM), [prefix[:40]] * 2) == [0, 32]
    without = LLM(decoder, block_size=SIZE, **ROOM | {"enable_prefix_caching": False})
    assert hits(without, [prefix[:45], *longer]) == [0, 0, 0, 0]


def test_the_state_that_was_used_last_stays(decoder: Decoder) -> None:
    """One state is kept here: the state of the prompt before."""
    one, other = ([n, *prompts(1, seed=3)[0] * 30][:30] for n in (1, 2))
    llm = LLM(decoder, block_size=SIZE, **ROOM | {"state_share": 1e-9})
    assert hits(llm, [one, one, other, other, one, one]) == [0, 24, 0, 24, 0, 24]


def kept_by(llm: LLM, prompt: list[int]) -> list[int]:
    """The numbers of a prompt's tokens after which a state is kept, whoever has read them."""
    pool = llm.engine.pool
    digest, found = pool._salted(""), []
    for end in range(SIZE, len(prompt) + 1, SIZE):
        digest = pool._digest(digest, array("q", prompt[end - SIZE : end]).tobytes())
        found += [end] * pool.snapshots.has(digest)
    return found


def test_where_a_second_prompt_branches_off_the_third_begins(decoder: Decoder) -> None:
    """... and the output says how many tokens hit, and why not more."""
    prefix, llm = prompts(1, seed=3)[0] * 4, LLM(decoder, block_size=SIZE, **ROOM)
    asked = [[*prefix[:40], *range(n, n + length)] for n, length in ((1, 20), (2, 11), (3, 20), (4, 1))]
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in asked]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 40, 40]
    assert [output.cache_hit for output in outputs] == [
        "0 of 60 tokens hit: no page is there after 0",
        "0 of 51 tokens hit: pages of 40 are there, no state is kept between 0 and 40",
        "40 of 60 tokens hit: no page is there after 40",
        "40 of 41 tokens hit: a page has 8, and the last token is always read",
    ]
    assert [kept_by(llm, prompt) for prompt in asked] == [[40, 56], [40, 48], [40, 56], [40]]
    for prompt, output in zip(asked, outputs, strict=True):
        assert likeliest(decoder, prompt, output.outputs[0].token_ids) == output.outputs[0].token_ids


def test_prompts_that_branch_off_in_one_step_keep_a_state_there(decoder: Decoder) -> None:
    """The blocks of the first are known as soon as its step is planned."""
    prefix, llm = prompts(1, seed=3)[0] * 4, LLM(decoder, block_size=SIZE, **ROOM)
    asked = [[*prefix[:40], *range(n, n + 15)] for n in (1, 2)]
    for prompt, (answer,) in zip(asked, tokens_of(llm, asked, GREEDY), strict=True):
        assert likeliest(decoder, prompt, answer) == answer
        assert kept_by(llm, prompt) == [40, 48]
    assert hits(llm, [[*prefix[:40], 9, 9]]) == [40]


@pytest.mark.parametrize("how", [{}, {"max_batched_tokens": 13}, {"max_batched_tokens": 1}, {"deterministic": True}], ids=str)
def test_states_are_kept_at_marks_alone(how: dict, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a prompt is cut: after its last block, after 16, 32, 64, ... and each `state_every` tokens, and nowhere else."""
    prompt = (prompts(1, seed=3)[0] * 9)[:77]
    room = ROOM | {"num_blocks": 100, "state_share": 0.9} | how
    for first, every, due in (
        (256, 8192, [72]), (256, 17, [24, 48, 72]), (16, 16, [16, 32, 48, 64, 72]), (256, 40, [40, 72]),
        (256, 1, [*range(8, 73, 8)]), (16, 8192, [16, 32, 64, 72]),
        (15, 40, [16, 32, 40, 72]), (9, 33, [16, 32, 40, 72]), (64, 64, [64, 72]),
    ):  # fmt: skip
        monkeypatch.setattr(state_plan, "FIRST", first)
        llm = LLM(decoder, block_size=SIZE, state_every=every, **room)
        assert hits(llm, [prompt, [*prompt[:50], 1, 2]]) == [0, max((mark for mark in due if mark <= 48), default=0)]
        assert kept_by(llm, prompt) == sorted({*due, 48})
    # a prompt that ends with a block leaves two: a prompt that is the same begins before its last token
    monkeypatch.undo()
    monkeypatch.setitem(mixers.MIXERS, "decaying_sum", 1)
    monkeypatch.setitem(registry.MIXERS, "decaying_sum", DecayingSum)
    llm = LLM(decoder, block_size=SIZE, **room)
    assert hits(llm, [prompt[:72], prompt[:72], prompt]) == [0, 64, 72]


@pytest.mark.parametrize("shared", [8, 15, 16, 31, 32, 40, 63, 70])
def test_a_second_prompt_begins_behind_more_than_half_of_what_it_shares(
    shared: int, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and the third behind all of it, but for a part of a block."""
    monkeypatch.setattr(state_plan, "FIRST", 16)
    prefix = (prompts(1, seed=3)[0] * 9)[:shared]
    llm = LLM(decoder, block_size=SIZE, **ROOM)
    first, second, third = hits(llm, [[*prefix, *range(n, n + 9)] for n in (1, 11, 31)])
    assert (first, third) == (0, shared // SIZE * SIZE)
    assert 2 * second > shared - 1 or shared < 16


@pytest.mark.parametrize("tokens", [96, 13])
def test_marks_cut_no_step(tokens: int, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes as many steps as it would without a state, whatever its length, alone and beside others."""
    monkeypatch.setattr(state_plan, "FIRST", 8)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for length in (1, 7, 8, 9, 24, 33, 64, 75):
        llm = LLM(decoder, block_size=SIZE, **ROOM | {"max_batched_tokens": tokens})
        prompt = (prompts(1, seed=3)[0] * 9)[:length]
        llm.generate([prompt, [*prompt[::-1], 3]], one)
        assert llm.engine.steps["steps"] == -(-(2 * length + 1) // tokens)


def test_without_a_share_no_state_is_kept(decoder: Decoder) -> None:
    """No prefix is found then."""
    prompt = (prompts(1, seed=3)[0] * 9)[:45]
    llm = LLM(decoder, block_size=SIZE, state_share=0, **ROOM)
    assert hits(llm, [prompt, prompt]) == [0, 0]
    assert llm.engine.steps["steps"] == 2 * TOKENS
    assert ", and 0 kept = 0 bytes" in str(llm.caches)


def test_a_prompt_whose_logprobs_are_asked_for_keeps_no_state(decoder: Decoder) -> None:
    """No request could find it, so it would only drive out others."""
    one, other = ([n, *prompts(1, seed=3)[0] * 30][:30] for n in (1, 2))
    told = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=1)
    llm = LLM(decoder, block_size=SIZE, **ROOM | {"state_share": 1e-9})
    hits(llm, [one])
    assert len(llm.generate([other], told)[0].prompt_logprobs) == 30
    assert llm.engine.pool.snapshots.kept == 1
    assert hits(llm, [one]) == [24]
    # samples that begin later, and answers that are preempted, read such a prompt again
    asked = prompts(9)
    settings = {"max_model_len": 96, "num_blocks": 20, "max_num_seqs": 2}
    (due,) = tokens_of(LLM(decoder, block_size=SIZE, **ROOM), [one], SamplingParams(n=4, seed=1, max_tokens=9, ignore_eos=True))
    llm = LLM(decoder, block_size=SIZE, **settings)
    many = SamplingParams(n=4, seed=1, max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    assert tokens_of(llm, [one, *asked], many)[0] == due


def test_states_of_answers_are_not_kept(decoder: Decoder) -> None:
    """... neither of those that are preempted and read again, nor of the token that is read a step too far."""
    llm, asked = LLM(decoder, block_size=SIZE, max_model_len=96, num_blocks=20, max_batched_tokens=10), prompts(9)
    llm.engine._ahead = True
    keep, kept = llm.engine.pool.snapshots.keep, []
    llm.engine.pool.snapshots.keep = lambda digest, **how: kept.append(digest) or keep(digest, **how)
    answers = [answer for (answer,) in tokens_of(llm, asked, GREEDY)]
    assert llm.engine.scheduler.preemptions > 0
    due = set()
    for prompt in asked:
        digest = llm.engine.pool._salted("")
        for end in range(SIZE, len(prompt) + 1, SIZE):
            digest = llm.engine.pool._digest(digest, array("q", prompt[end - SIZE : end]).tobytes())
            due.add(digest)
    assert set(kept) <= due
    # the next turn of a talk begins where the prompt of the last one did, since pages without a state are none
    talk = [*asked[8], *answers[8]]
    assert len(asked[8]) >= 2 * SIZE
    fresh = LLM(decoder, block_size=SIZE, **ROOM)
    fresh.engine._ahead = True
    assert hits(fresh, [asked[8], [*talk, 1, 2, 3]]) == [0, len(asked[8]) // SIZE * SIZE]


def test_an_answer_that_ends_leaves_no_token_that_was_read_too_far(decoder: Decoder) -> None:
    """Its last token ends it, and is read nevertheless: no block and no state has it, though a block ends with it."""
    llm = LLM(decoder, block_size=SIZE, **ROOM)
    llm.engine._ahead = True
    tried = 0
    for prompt in ((prompts(1, seed=3)[0] * 4)[:length] for length in range(16, 32)):
        (answer,) = tokens_of(LLM(decoder, block_size=SIZE, **ROOM), [prompt], GREEDY)[0]
        ends = (n for n in range(1, TOKENS) if (len(prompt) + n + 1) % SIZE == 0 and answer[n] not in answer[:n])
        if (end := next(ends, None)) is None:
            continue
        tried += 1
        llm.engine.pool.forget_prefixes()
        stopped = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop_token_ids=[answer[end]])
        (output,) = llm.generate([prompt], stopped)
        whole = [*prompt, *output.outputs[0].token_ids]
        assert whole[len(prompt) :] == answer[: end + 1]
        table = llm.engine.pool.begin([*whole, 1])
        assert (table.found, table.length) == (len(whole) - SIZE, len(prompt) // SIZE * SIZE)
        llm.engine.pool.free(table)
        assert kept_by(llm, whole) == sorted({(len(prompt) - 1) // SIZE * SIZE, len(prompt) // SIZE * SIZE})
        assert hits(llm, [[*whole, 1]]) == [len(prompt) // SIZE * SIZE]
    assert tried > 2


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_that_are_cancelled_give_their_rows_up(ahead: bool, decoder: Decoder) -> None:
    """... wherever they are: waiting, in the middle of a prompt, in a step that runs, or in an answer. Others go on as before."""
    llm = LLM(decoder, block_size=SIZE, **ROOM | {"max_num_seqs": 4, "max_batched_tokens": 11})
    engine, rng = llm.engine, random.Random(5)
    engine._ahead = ahead
    asked = [prompt * (1 + len(prompt) // 40) for prompt in prompts(24)]
    live = {engine.add(prompt[:60], GREEDY): prompt[:60] for prompt in asked}
    ended = []
    while live:
        ended += [request for request in engine.step() if not request.live]
        if rng.random() < 0.15:
            cancelled = rng.choice(list(live))
            engine.abort(cancelled)
            assert all(answer.slot < 0 and answer.table is None for answer in cancelled.answers)
            del live[cancelled]
        for request in [each for each in ended if each in live]:
            prompt = live.pop(request)
            assert likeliest(decoder, prompt, request.answers[0].ids[len(prompt) :]) == request.answers[0].ids[len(prompt) :]
    while not engine.idle:
        engine.step()
    assert 3 < len(ended) < 21
    engine.check_idle()
    assert_clean(llm)


def test_prompts_that_are_alike_and_come_together(decoder: Decoder) -> None:
    """A step that writes a state is no step that reads it."""
    asked = [prompts(1, seed=3)[0] * 4 + [n] for n in range(4)]
    for more in ({}, {"max_batched_tokens": 30}):
        found = tokens_of(LLM(decoder, block_size=SIZE, **ROOM | more), asked, GREEDY)
        for prompt, (answer,) in zip(asked, found, strict=True):
            assert likeliest(decoder, prompt, answer) == answer


def test_states_have_their_share_of_memory() -> None:
    config = config_with(PATTERNS["some"])
    found = registry.mixers_of(config, EngineConfig(block_size=SIZE))
    layout = CacheLayout(SIZE, tuple(spec for mixer in found for spec in mixer.specs()))
    load = PeakLoad(answers=8, tokens=24, kept=2)
    # a row for each answer, for padding, for zeros, and for two states that are kept; two layers of 2 heads of 8 x 8 numbers
    assert layout.state_bytes(load) == (8 + 1 + 1 + 2) * 2 * 2 * 8 * 8 * 4
    # one layer has pages
    assert layout.block_bytes(torch.float32) == 2 * SIZE * 2 * 8 * 4
    assert layout.blocks_in(layout.state_bytes(load) + 3000, torch.float32, load) == 2
    assert layout.blocks_in(1000, torch.float32, load) == 0


def test_what_reads_answers_again_token_by_token_does_not_go_with_a_state(decoder: Decoder) -> None:
    fitted = LokiLayers([Loki.fit(torch.randn(50, 2, 8)) for _ in range(3)])
    if "attention" in decoder.config.mixers:
        with pytest.raises(Unsupported, match="approximate is given and the model has layers with a state"):
            LLM(decoder, approximate=fitted, **ROOM)
