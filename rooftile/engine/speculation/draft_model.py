"""`DraftModel`: a smaller model that guesses, one token after the other, for all answers of a step together.

Its keys lie beside the larger model's, in the same blocks: forks, prefixes and preemption need no books of its own. It reads
what it lacks when it drafts: after a draft one or two tokens, of a new answer the prompt. So a batch too large for drafts costs
nothing, and a refused token leaves nothing to take back.

A guess is drawn as the larger model's token will be: with the same parameters, and with the noise of the same seed and position.
With the same logits it is the same token. With probabilities p and q of the two models, a guess is accepted with probability

    sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i))    which is at least (1 - D) / (1 + D), D = sum |p - q| / 2

Daliri, Musco, Suresh, Coupling without communication and drafter-invariant speculative decoding, arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.requests.request import Answer
from rooftile.engine.sampling.features import SamplingFeatures, features_of
from rooftile.engine.speculation.draft_reads import DraftReads
from rooftile.engine.steps.runner import Runner
from rooftile.engine.steps.scheduler import ScheduledTokens
from rooftile.engine.steps.step import Step
from rooftile.engine.steps.step_inputs import StepInputs
from rooftile.engine.steps.step_maker import bare_step
from rooftile.kvcache import BlockPool

# so few tokens are rows of a graph each; more are a chunk
FEW = 2


class _Asked(NamedTuple):
    """An answer, the first token to read, and how many to guess."""

    answer: Answer
    start: int
    wanted: int

    @property
    def tokens(self) -> int:
        return len(self.answer.ids) - self.start


class DraftModel:
    """The draft model of one engine; a `Drafter`.

    Args:
        runner: runs it; block tables and sampling parameters are the larger model's.
        pool: the blocks.
        max_len: the longest sequence that it reads.
        most_tokens: the most tokens that it reads in one run.
        vocab: the larger model's tokens, which may be more.
    """

    def __init__(self, runner: Runner, pool: BlockPool, *, max_len: int, most_tokens: int, vocab: int) -> None:
        self.runner, self.max_len, self.most_tokens, self._vocab = runner, max_len, most_tokens, vocab
        self._reads = DraftReads(pool)
        own = runner.decoder.config.vocab_size
        # the first token that it has no row for in its embedding
        self._foreign = own if own < vocab else None
        self._always = SamplingFeatures(chance=runner.device.type == "cuda")

    def can(self, answer: Answer, count: int) -> bool:
        return len(answer.ids) + answer.pending + count <= self.max_len

    def note(self, answer: Answer, drafted: int, accepted: int) -> None:
        # the last guess was not read
        self._reads.note(answer, len(answer.ids) - 1 + min(accepted + 1, drafted))

    def guess(
        self, asked: Sequence[tuple[Answer, int]], entries: Mapping[tuple[int, int], int]
    ) -> dict[Answer, list[int]]:  # fmt: skip
        ready, later = self._sort(_Asked(answer, self._reads.known(answer), count) for answer, count in asked)
        if not ready and not later:
            return {}
        features = self._always
        for answer in {id(each.answer.request): each.answer for each in ready}.values():
            wanted = features_of(answer.request.params)
            features |= SamplingFeatures(chance=wanted.chance, truncation=wanted.truncation)
        drawn = self._draw(ready, later, features, entries)
        for each in ready:
            self._reads.note(each.answer, len(each.answer.ids))
        for work in later:
            self._reads.note(work.answer, work.start + work.tokens)
        rows = [row.tolist() for row in drawn]
        # it may have a token that the larger model lacks, or none at all to draw
        return {
            each.answer: list(takewhile(range(self._vocab).__contains__, (row[n] for row in rows[: each.wanted])))
            for n, each in enumerate(ready)
        }

    def _sort(self, asked: Iterable[_Asked]) -> tuple[list[_Asked], list[ScheduledTokens]]:
        """Returns answers for which there is a draft, the longest first, and what is read for drafts of later steps."""
        ready, later, budget = list[_Asked](), list[ScheduledTokens](), self.most_tokens
        # those that lack little come first: a long prompt is read beside their drafts
        for each in sorted(asked, key=lambda each: each.tokens):
            tokens = min(each.tokens, budget)
            if not tokens or self._lacks(each.answer.ids[each.start :]):
                continue
            budget -= tokens
            if tokens == each.tokens:
                ready.append(each)
            else:
                later.append(ScheduledTokens(each.answer, each.start, tokens, ()))
        ready.sort(key=lambda each: -each.wanted)
        return ready, later

    def _lacks(self, tokens: Sequence[int]) -> bool:
        """Whether its vocabulary lacks a token."""
        return self._foreign is not None and max(tokens) >= self._foreign

    @torch.inference_mode()
    def _draw(
        self, ready: Sequence[_Asked], later: Sequence[ScheduledTokens], features: SamplingFeatures,
        entries: Mapping[tuple[int, int], int],
    ) -> list[Tensor]:  # fmt: skip
        """Returns a token for each answer, (n,), then another for each that wants one more, and so on."""
        single = not later and all(each.tokens <= FEW for each in ready)
        step, last = _first_step(ready, later, features, entries, single=single)
        _, tokens, _ = self.runner.execute(step)
        if not ready:
            return []
        slots, positions = (torch.tensor(row) for row in zip(*((e.answer.slot, len(e.answer.ids)) for e in ready), strict=True))
        if len(last) < len(tokens):
            # where an answer has two rows, either may have been the last to tell which token was drawn
            last_rows, where = (self._send(x) for x in (torch.tensor(last), slots))
            tokens = tokens.index_select(0, last_rows)
            self.runner.sampling.last.index_copy_(0, where, tokens.clamp(min=0))
        drawn = [tokens.clone()]
        for depth in range(1, ready[0].wanted):
            rows = sum(each.wanted > depth for each in ready)
            inputs = _following(slots[:rows], positions[:rows] + (depth - 1))
            _, tokens, _ = self.runner.execute(bare_step(inputs, features, single=True))
            # a graph writes the next tokens into the same memory
            drawn.append(tokens.clone())
        # one copy to the host
        return list(torch.cat(drawn).cpu().split([len(each) for each in drawn]))

    def _send(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.runner.device, non_blocking=True) if self.runner.device.type == "cuda" else x


def _first_step(
    ready: Sequence[_Asked], later: Sequence[ScheduledTokens], features: SamplingFeatures,
    entries: Mapping[tuple[int, int], int], *, single: bool,
) -> tuple[Step, list[int]]:  # fmt: skip
    """Returns the step that reads what is lacking, and of each answer that is ready the output of its last token."""
    works: list[ScheduledTokens] = []
    last: list[int] = []
    for answer, start, _ in ready:
        tokens = len(answer.ids) - start
        if single:
            # a graph gives an output for each row
            works += [ScheduledTokens(answer, start + n, 1, (answer,)) for n in range(tokens)]
        else:
            works.append(ScheduledTokens(answer, start, tokens, (answer,)))
        last.append(len(works) - 1)
    inputs = StepInputs.of_singles(works) if single else StepInputs.of([*works, *later])
    return bare_step(inputs, features, single=single, entries=entries), last


def _following(slots: Tensor, positions: Tensor) -> StepInputs:
    """Returns the step that reads the token of each slot that was drawn last."""
    none = slots[:0]
    tokens = torch.full_like(slots, -1)
    return StepInputs(tokens, positions, slots, torch.arange(len(slots)), slots, positions + 1, torch.zeros(1).long(), none, none)
