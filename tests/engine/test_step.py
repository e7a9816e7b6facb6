"""A step is integers alone: what rank 0 sends to other ranks, and what they get."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.engine.requests.request import Answer, Request
from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.sampling.new_slots import NewSlots
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.steering import free_mask, mask_of
from rooftile.engine.steps.rounds import Mark, MarkedChunk
from rooftile.engine.steps.scheduler import ScheduledTokens, StepPlan
from rooftile.engine.steps.step import Step, decode, encode
from rooftile.engine.steps.step_inputs import StepInputs
from rooftile.engine.steps.step_maker import StepMaker

NUMBERS = st.integers(-(2**63), 2**63 - 1)


def tensors(rows: int | None = None) -> st.SearchStrategy[Tensor]:
    """int64 tensors of one dimension, or of `rows` rows; also empty ones."""

    def made(columns: int) -> st.SearchStrategy[Tensor]:
        count = columns * (1 if rows is None else rows)
        flat = st.lists(NUMBERS, min_size=count, max_size=count).map(lambda found: torch.tensor(found, dtype=torch.int64))
        return flat if rows is None else flat.map(lambda x: x.view(rows, columns))

    return st.integers(0, 4).flatmap(made)


def masks() -> st.SearchStrategy[Tensor]:
    """Masks of some words: also none of them, which are as wide as any."""
    return st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda shape: torch.full(shape, -5, dtype=torch.int64))


STEPS = st.builds(
    Step,
    inputs=st.tuples(*[tensors()] * 9).map(lambda found: StepInputs(*found)),
    started=st.tuples(*(tensors(rows) for rows in (11, 2, 2, 2, 3))).map(lambda found: NewSlots(*found)),
    facts=tensors(),
    entries=tensors(3), copies=tensors(2), rows=tensors(2), row_copies=tensors(2), states=tensors(2), states_after=tensors(2),
    marks=tensors(3), bans=tensors(2), depths=tensors(), masked=tensors(2), masks=masks(), scored=tensors(3), following=tensors(),
    adapters=tensors(),
)  # fmt: skip


def flat(step: Step) -> list[Tensor]:
    return [*step.inputs, *step.started, *step[2:]]


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_a_step_comes_out_of_its_buffer_as_it_went_in(step: Step) -> None:
    buffer = encode(step)
    assert (buffer.dtype, buffer.dim()) == (torch.int64, 1)
    for due, found in zip(flat(step), flat(decode(buffer)), strict=True):
        assert found.shape == due.shape
        assert torch.equal(found, due)


def answer_of(ids: list[int], slot: int, params: SamplingParams | None = None, known: int = 0) -> Answer:
    request = Request(slot, ids, params or SamplingParams(), 10, frozenset({3}))
    return Answer(request, 0, 0, [*ids, *range(known)], slot=slot, pending=1)


def test_single_tokens_are_laid_out_as_in_any_step() -> None:
    works = []
    for slot, length in ((3, 4), (0, 9), (2, 1)):
        answer = answer_of(list(range(length)), slot)
        works.append(ScheduledTokens(answer, length - (slot != 0), 1, (answer,)))
    for due, found in zip(StepInputs.of(works), StepInputs.of_singles(works), strict=True):
        assert (found.tolist(), found.dtype) == (due.tolist(), due.dtype)


def test_a_step_has_all_of_its_plan() -> None:
    maker = StepMaker(9, 100, always=SamplingFeatures(chance=True), all_chunks=False, separates_prompts=False)
    asked = SamplingParams(
        temperature=0.5, top_k=200, frequency_penalty=0.25, logit_bias={7: 1.5}, allowed_token_ids=[7, 8], min_tokens=3,
        prompt_logprobs=2, logprobs=5,
    )  # fmt: skip
    reading, plain = answer_of([5, 6, 7, 8], 4, asked, known=2), answer_of([9] * 3, 1)
    plan = StepPlan(
        [ScheduledTokens(plain, 2, 1, (plain,)), ScheduledTokens(reading, 1, 3, (reading,), ((3, 40),))],
        entries={(4, 0): 17, (1, 2): 18}, rows={17: 2}, started=[reading], states={5: 6}, states_after={7: 5},
    )  # fmt: skip
    step = maker.make(plan)
    assert step.inputs.tokens.tolist() == [6, 7, 8, 9]
    assert step.chunks() == [MarkedChunk(3, 4, (Mark(2, 40),))]
    assert step.features == SamplingFeatures(chance=True, truncation=True, penalties=True, bias=True)
    assert (step.only_decodes, step.tops) == (False, 5)
    assert step.entries.T.tolist() == [[4, 0, 17], [1, 2, 18]]
    assert (step.rows.tolist(), step.states.tolist(), step.states_after.tolist()) == ([[17], [2]], [[5], [6]], [[7], [5]])
    # row 1 is the one that may not end yet
    assert step.bans.T.tolist() == [[1, 3]]
    # the prompt's tokens behind those at 1 and 2; behind the last comes an answer
    assert (step.scored.T.tolist(), step.following.tolist()) == ([[0, 2, 2]], [7, 8])
    assert maker.scored_works(plan.work) == [plan.work[1]]
    started = step.started
    assert started.numbers[:4, 0].tolist() == [4, 0, 100, 0b01111]
    assert started.numbers[4:].view(torch.float64)[:, 0].tolist() == [0.5, 1.0, 0.0, 0.0, 0.25, 1.0, 1.0]
    assert started.prompted.tolist() == [[4] * 4, [5, 6, 7, 8]]
    assert started.counted.tolist() == [[4] * 2, [0, 1]]
    assert started.allowed.tolist() == [[4] * 2, [7, 8]]
    assert started.biases[:2].tolist() == [[4], [7]]
    assert started.biases[2].view(torch.float64).tolist() == [1.5]


def test_a_step_that_only_decodes_is_short() -> None:
    """At most some hundred bytes for an answer: it is sent once a step."""
    maker = StepMaker(256, 128256, always=SamplingFeatures(), all_chunks=False, separates_prompts=False)
    answers = [answer_of([1, 2], slot) for slot in range(256)]
    step = maker.make(StepPlan([ScheduledTokens(answer, 2, 1, (answer,)) for answer in answers]))
    assert step.only_decodes
    assert step.tops is None
    assert encode(step).nbytes < 256 * 50


def test_a_mask_is_sent_where_it_changes() -> None:
    maker = StepMaker(4, 100, always=SamplingFeatures(), all_chunks=False, separates_prompts=False)
    answer = answer_of([1, 2], 3)
    plan = StepPlan([ScheduledTokens(answer, 1, 1, (answer,))])
    some, other = mask_of([7], 100), mask_of([7], 100)
    begins = replace(plan, started=[answer])
    # what may come, whether the answer begins, or begins again; the masks that are sent, and whether the step computes with one
    for mask, again, sent, computed in [
        (free_mask(100), True, 0, False), (free_mask(100), False, 0, False), (some, False, 1, True), (some, False, 0, True),
        (other, False, 1, True), (other, True, 1, True), (free_mask(100), False, 1, False), (free_mask(100), True, 0, False),
    ]:  # fmt: skip
        answer.grammar = SimpleNamespace(mask=mask)  # type: ignore[assignment]
        step = maker.make(begins if again else plan)
        assert step.masked.tolist() == [[3] * sent, [0] * sent]
        assert (len(step.masks), step.features.mask) == (sent, computed)
        if sent:
            assert step.masks.view(torch.int32)[0, : len(mask)].tolist() == mask.tolist()
