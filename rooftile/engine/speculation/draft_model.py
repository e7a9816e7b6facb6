"""`DraftModel`: a smaller model that guesses, one token after the other, for all answers of a step together.

Its keys lie beside the larger model's, in the same blocks: forks, prefixes and preemption need no books of its own. It reads
what it lacks when it drafts: after a draft one or two tokens, of a new answer the prompt. So a batch too large for drafts costs
nothing, and a refused token leaves nothing to take back.

A head (`HeadRunner`) reads pairs: the larger model's features of a token, and the token behind it, so one pair less than there
are tokens. What it read of its own guesses was with its own features, so it reads those that were accepted once more.

A guess is drawn as the larger model's token will be: with the same parameters, and with the noise of the same seed and position.
With the same logits it is the same token. With probabilities p and q of the two models, a guess is accepted with probability

    sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i))    which is at least (1 - D) / (1 + D), D = sum |p - q| / 2

Daliri, Musco, Suresh, Coupling without communication and drafter-invariant speculative decoding, arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.requests.request import Answer
from rooftile.engine.sampling.features import SamplingFeatures, features_of
from rooftile.engine.speculation.draft_reads import DraftReads
from rooftile.engine.steps.runner import Runner
from rooftile.engine.steps.step_inputs import StepInputs
from rooftile.engine.steps.step_maker import bare_step
from rooftile.kvcache import BlockPool


class _Reading(NamedTuple):
    """Tokens of an answer to read, and how many to guess behind them; none if there are more to read."""

    answer: Answer
    start: int
    tokens: int
    wanted: int


class DraftModel:
    """The draft model of one engine; a `Drafter`.

    Args:
        runner: runs it; block tables and sampling parameters are the larger model's.
        pool: the blocks.
        max_len: the longest sequence that it reads.
        most_tokens: the most tokens that it reads in one run.
        vocab: the larger model's tokens, which may be more.
        few: so few tokens of each answer are rows of a graph; more are a chunk.
    """

    def __init__(self, runner: Runner, pool: BlockPool, *, max_len: int, most_tokens: int, vocab: int, few: int = 2) -> None:
        self.runner, self.max_len, self.most_tokens, self._vocab, self._few = runner, max_len, most_tokens, vocab, few
        self._reads = DraftReads(pool)
        own = runner.decoder.config.vocab_size
        # the first token that it has no row for in its embedding
        self._foreign = own if own < vocab else None
        self._always = SamplingFeatures(chance=runner.device.type == "cuda")
        # how many tokens a position's own token is behind it: 1 where it reads pairs
        self._shift = runner.behind - 1

    def can(self, answer: Answer, count: int) -> bool:
        known = len(answer.ids) + answer.pending
        return known > self._shift and known + count <= self.max_len

    def note(self, answer: Answer, drafted: int, accepted: int) -> None:
        if not self._shift:
            # the last guess was not read
            self._reads.note(answer, len(answer.ids) - 1 + min(accepted + 1, drafted))

    def guess(
        self, asked: Sequence[tuple[Answer, int]], entries: Mapping[tuple[int, int], int]
    ) -> dict[Answer, list[int]]:  # fmt: skip
        read = self._sorted(asked)
        if not read:
            return {}
        features = self._always
        for answer in {id(each.answer.request): each.answer for each in read}.values():
            wanted = features_of(answer.request.params)
            features |= SamplingFeatures(chance=wanted.chance, truncation=wanted.truncation)
        drawn = self._draw(read, features, entries)
        for each in read:
            self._reads.note(each.answer, each.start + each.tokens)
        rows = [row.tolist() for row in drawn]
        # it may have a token that the larger model lacks, or none at all to draw
        return {
            each.answer: list(takewhile(range(self._vocab).__contains__, (row[n] for row in rows[: each.wanted])))
            for n, each in enumerate(read)
            if each.wanted
        }

    def _sorted(self, asked: Iterable[tuple[Answer, int]]) -> list[_Reading]:
        """Returns what to read, within the budget, those first for which most is to be guessed."""
        found, budget = list[_Reading](), self.most_tokens
        lacking = []
        for answer, wanted in asked:
            total, begins = len(answer.ids) - self._shift, not answer.read_by_draft
            start = self._reads.known(answer, total)
            if begins and self._shift:
                # the last pair of a block that another answer has read may have had another token behind it
                start = max(0, start - 1)
            lacking.append(_Reading(answer, start, total - start, wanted))
        # those that lack little come first: a long prompt is read beside their drafts
        for each in sorted(lacking, key=lambda each: each.tokens):
            tokens = min(each.tokens, budget)
            if not tokens or self._lacks(each.answer.ids[each.start :]):
                continue
            budget -= tokens
            found.append(each if tokens == each.tokens else each._replace(tokens=tokens, wanted=0))
        return sorted(found, key=lambda each: -each.wanted)

    def _lacks(self, tokens: Sequence[int]) -> bool:
        """Whether its vocabulary lacks a token."""
        return self._foreign is not None and max(tokens) >= self._foreign

    @torch.inference_mode()
    def _draw(
        self, read: Sequence[_Reading], features: SamplingFeatures, entries: Mapping[tuple[int, int], int]
    ) -> list[Tensor]:  # fmt: skip
        """Returns a token for each answer, (n,), then another for each that wants one more, and so on."""
        rows = sum(each.tokens for each in read)
        single = rows <= self.runner.most_rows and all(each.tokens <= self._few for each in read)
        inputs = self._inputs(read, single=single)
        _, tokens, _ = self.runner.execute(bare_step(inputs, features, single=single, entries=entries))
        ends = torch.tensor([*accumulate(each.tokens for each in read)])
        slots = torch.tensor([each.answer.slot for each in read])
        if single and len(read) < len(tokens):
            # where an answer has several rows, any may have been the last to tell which token was drawn
            last_rows, where = self._send(ends - 1), self._send(slots)
            tokens = tokens.index_select(0, last_rows)
            self.runner.sampling.last.index_copy_(0, where, tokens.clamp(min=0))
        drawn = [tokens.clone()]
        positions = torch.tensor([each.start + each.tokens for each in read])
        before = 0
        for depth in range(1, read[0].wanted):
            rows = sum(each.wanted > depth for each in read)
            own, places = slots[:rows], positions[:rows] + (depth - 1)
            # a graph writes the next tokens into the same memory
            drawn.append(self.runner.execute_next(own, places, features, again=rows == before).clone())
            before = rows
        # one copy to the host
        return list(torch.cat(drawn).cpu().split([len(each) for each in drawn]))

    def _inputs(self, read: Sequence[_Reading], *, single: bool) -> StepInputs:
        """Returns the step that reads tokens as rows, which have an output each, or as chunks, which have one at their ends."""
        ids = [each.answer.ids[each.start + self._shift :][: each.tokens] for each in read]
        tokens = torch.tensor([token for part in ids for token in part])
        positions = torch.cat([torch.arange(each.start, each.start + each.tokens) for each in read])
        counts, own = torch.tensor([each.tokens for each in read]), torch.tensor([each.answer.slot for each in read])
        slots = own.repeat_interleave(counts)
        if single:
            return StepInputs.of_rows(tokens, positions, slots, behind=self.runner.behind)
        cu_q = torch.cat((torch.zeros(1).long(), counts.cumsum(0)))
        rows = cu_q[1:] - 1
        ends = positions[rows]
        return StepInputs(tokens, positions, slots, rows, own, ends + self.runner.behind, cu_q, ends + 1, own)

    def _send(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.runner.device, non_blocking=True) if self.runner.device.type == "cuda" else x
