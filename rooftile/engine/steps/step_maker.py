"""`StepMaker`: turns a `StepPlan`, which knows answers, into a `Step`, which has integers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rooftile.engine.requests.request import Answer
from rooftile.engine.sampling.features import SamplingFeatures, features_of
from rooftile.engine.sampling.forbidden import banned_next
from rooftile.engine.sampling.new_slots import NONE as NO_SLOTS
from rooftile.engine.sampling.new_slots import NewSlots
from rooftile.engine.sampling.steering import Mask, free_mask
from rooftile.engine.speculation.draft import Draft
from rooftile.engine.steps.scheduler import ScheduledTokens, StepPlan
from rooftile.engine.steps.step import Step
from rooftile.engine.steps.step_inputs import StepInputs, in_reading_order, is_single, rows_of_drafts, split_prompts


class StepMaker:
    """Makes the steps of one engine.

    Args:
        slots: how many answers run at once.
        vocab: the number of tokens.
        always: the features that every step computes.
        all_chunks: whether single tokens are chunks of one.
        separates_prompts: whether some layer computes a prompt's tokens otherwise than an answer's.
    """

    def __init__(self, slots: int, vocab: int, *, always: SamplingFeatures, all_chunks: bool, separates_prompts: bool) -> None:
        self.vocab, self.always = vocab, always
        self.all_chunks, self.separates_prompts = all_chunks, separates_prompts
        # the features that each slot's request asks for
        self._features = [SamplingFeatures()] * slots
        # the mask that each slot has on the device
        self._sent: list[Mask] = [free_mask(vocab)] * slots
        # the slot of its adapter; -1 for none
        self._adapters = torch.full((slots,), -1)
        # one object for equal features, so that a step of many answers joins few
        self._kinds: dict[SamplingFeatures, SamplingFeatures] = {}

    def make(self, plan: StepPlan) -> Step:
        """Returns the step of a plan."""
        for answer in plan.started:
            # whether a mask is asked for is seen from step to step
            features = replace(features_of(answer.request.params), mask=False)
            self._sent[answer.slot] = free_mask(self.vocab)
            self._features[answer.slot] = self._kinds.setdefault(features, features)
            self._adapters[answer.slot] = -1 if answer.request.adapter is None else answer.request.adapter.slot
        works = rows_of_drafts(plan.work)
        answers = [answer for work in works for answer in work.outputs]
        outputs: list[_Output] = []
        # most steps have none of these
        if works is not plan.work or any(map(_is_steered, answers)):
            outputs = [_Output(each, n, work.draft) for work in plan.work for each in work.outputs for n in range(rows_of(work))]
        bans = [(row, token) for row, output in enumerate(outputs) if _may_be_banned(output.answer) for token in output.bans()]
        steered = [output for output in outputs if output.answer.grammar is not None]
        masked = self._changed_masks(steered)
        features = self._features_of(answers)
        if any(output.mask() is not free_mask(self.vocab) for output in steered):
            features |= SamplingFeatures(mask=True)
        tops = max((n for answer in answers if (n := answer.request.top_count) is not None), default=-1)
        single = all(is_single(work, prompts_in_chunks=self.separates_prompts) and len(work.outputs) == 1 for work in works)
        scored, following = self._scored(works)
        inputs = self._inputs(works, single=single)
        return Step(
            inputs,
            self._started(plan.started),
            torch.tensor([features.bits, single, tops]),
            _columns(3, ((slot, column, block) for (slot, column), block in plan.entries.items())),
            _columns(2, plan.copies),
            _pairs(plan.rows),
            _columns(2, plan.row_copies),
            _pairs(plan.states),
            _pairs(plan.states_after),
            _columns(3, ((work.answer.slot, *kept) for work in plan.work for kept in work.kept)),
            _columns(2, bans),
            _NONE[1][0] if works is plan.work else torch.tensor([output.depth for output in outputs]),
            _columns(2, [(output.answer.slot, output.depth) for output, _ in masked]),
            self._masks([mask for _, mask in masked]),
            scored,
            following,
            self._adapters_of(inputs),
        )

    def scored_works(self, works: Sequence[ScheduledTokens]) -> list[ScheduledTokens]:
        """Returns the work whose prompt's logprobs a step computes, in the order of its rows."""
        ordered = in_reading_order(works, prompts_in_chunks=self.separates_prompts)
        return [work for work in ordered if _scored_tokens(work)]

    def _inputs(self, works: Sequence[ScheduledTokens], *, single: bool) -> StepInputs:
        if single and not self.all_chunks:
            return StepInputs.of_singles(works)
        works = split_prompts(works) if self.separates_prompts else works
        return StepInputs.of(works, all_chunks=self.all_chunks, prompts_in_chunks=self.separates_prompts)

    def _started(self, started: Sequence[Answer]) -> NewSlots:
        return NewSlots.of(
            [answer.slot for answer in started],
            [answer.request.params for answer in started],
            [answer.seed for answer in started],
            [answer.request.prompt for answer in started],
            [answer.ids[len(answer.request.prompt) :] for answer in started],
            vocab=self.vocab,
        )

    def _features_of(self, answers: Sequence[Answer]) -> SamplingFeatures:
        """Returns the union of what the answers ask for."""
        features = self.always
        for wanted in {id(wanted): wanted for wanted in (self._features[answer.slot] for answer in answers)}.values():
            features |= wanted
        return features

    def _adapters_of(self, inputs: StepInputs) -> Tensor:
        adapters = self._adapters[inputs.slots]
        return adapters if (adapters >= 0).any() else _NONE[1][0]

    def _changed_masks(self, steered: Sequence[_Output]) -> list[tuple[_Output, Mask]]:
        """Returns the outputs whose masks are other ones than their slots have on the device, in the order of writing."""
        found = []
        for output in steered:
            mask = output.mask()
            if mask is not self._sent[output.answer.slot]:
                self._sent[output.answer.slot] = mask
                found.append((output, mask))
        return found

    def _masks(self, found: Sequence[Mask]) -> Tensor:
        words = -(-self.vocab // 64)
        masks = np.zeros((len(found), 2 * words), dtype=np.int32)
        for row, mask in zip(masks, found, strict=True):
            row[: len(mask)] = mask
        return torch.from_numpy(masks.view(np.int64))

    def _scored(self, works: Sequence[ScheduledTokens]) -> tuple[Tensor, Tensor]:
        """Returns the rows of prompts whose tokens' logprobs are asked for, and the tokens that follow them."""
        if all(work.answer.request.params.prompt_logprobs is None for work in works):
            return _NONE[3], _NONE[1][0]
        found, following, row = [], list[int](), 0
        for work in in_reading_order(works, prompts_in_chunks=self.separates_prompts):
            count = _scored_tokens(work)
            if count:
                request = work.answer.request
                found.append((row, count, request.params.prompt_logprobs or 0))
                following += request.prompt[work.start + 1 : work.start + 1 + count]
            row += work.tokens
        return _columns(3, found), torch.tensor(following, dtype=torch.int64)


def bare_step(
    inputs: StepInputs, features: SamplingFeatures, *, single: bool, entries: Mapping[tuple[int, int], int] | None = None
) -> Step:  # fmt: skip
    """Returns a step that reads tokens and draws the next ones, and no more.

    Args:
        inputs: the tokens.
        features: the features of the draw.
        single: whether each token is read by itself and has an output.
        entries: new entries of the block tables: a block by (slot, column).
    """
    one, two, three = _NONE[1][0], _NONE[2], _NONE[3]
    written = _columns(3, ((slot, column, block) for (slot, column), block in (entries or {}).items()))
    return Step(
        inputs, NO_SLOTS, torch.tensor([features.bits, single, -1]), written, copies=two, rows=two, row_copies=two, states=two,
        states_after=two, marks=three, bans=two, depths=one, masked=two, masks=two.T, scored=three, following=one, adapters=one,
    )  # fmt: skip


class _Output(NamedTuple):
    """A row from which an answer gets a token."""

    answer: Answer
    depth: int  # how many drafted tokens it follows
    draft: Draft

    def bans(self) -> list[int]:
        """Returns the tokens that may not come next."""
        # the tokens that are due in this step are pending already
        before = self.answer.generated + self.answer.pending - 1 - len(self.draft.tokens) + self.depth
        return banned_next(self.answer, before, self.draft.tokens[: self.depth])

    def mask(self) -> Mask:
        """Returns the mask of the tokens that the answer's grammar has next."""
        assert self.answer.grammar is not None
        return self.draft.masks[self.depth - 1] if self.depth else self.answer.grammar.mask


def _may_be_banned(answer: Answer) -> bool:
    return bool(answer.request.banned or answer.request.params.min_tokens)


def _is_steered(answer: Answer) -> bool:
    """Whether some tokens may not come next."""
    return answer.grammar is not None or _may_be_banned(answer)


def rows_of(work: ScheduledTokens) -> int:
    """Returns from how many rows an answer gets a token."""
    return 1 + len(work.draft.tokens)


_NONE = {rows: torch.empty(rows, 0, dtype=torch.int64) for rows in (1, 2, 3)}


def _columns(rows: int, columns: Iterable[Sequence[int]]) -> Tensor:
    """Returns some columns of numbers as a tensor (rows, columns)."""
    columns = list(columns)
    return torch.tensor(columns).T if columns else _NONE[rows]


def _pairs(values: Mapping[int, int]) -> Tensor:
    return _columns(2, values.items())


def _scored_tokens(work: ScheduledTokens) -> int:
    """Returns how many of the tokens that follow the ones of `work` are a prompt's whose logprobs are asked for."""
    request = work.answer.request
    if request.params.prompt_logprobs is None:
        return 0
    return max(min(work.start + work.tokens, len(request.prompt) - 1) - work.start, 0)
