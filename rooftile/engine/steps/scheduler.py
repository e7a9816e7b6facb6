"""Decides what the model reads in the next step (continuous batching), in plain Python without a tensor.

A step mixes one token of each decoding answer with chunks of prompts (chunked prefill), `max_batched_tokens` in all. Decoding
comes first, then prompts that are partly read, then new requests. Each is in the order of priorities and then of age.

The samples of a request run and wait like requests of one prompt that came one after the other: as many run as there are slots
and blocks for, and the others follow. The prompt is read once: it stays in the cache until the last sample has begun, and one
that begins later reads only the prompt's last token again. The beams of a search run and wait together.

When the pool has no block left for a running answer, the newest answer of the least priority is preempted: it gives up its blocks
and waits again, before those that came later. Later it is computed again, except for what the cache still holds.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from rooftile.engine.requests.request import Answer, Request
from rooftile.engine.speculation.draft import NO_DRAFT, Draft
from rooftile.engine.speculation.speculator import Speculator
from rooftile.engine.steps.state_plan import StatePlan
from rooftile.engine.steps.waiting_queue import WaitingQueue
from rooftile.kvcache import BlockPool, BlockTable, Copy, OutOfBlocks
from rooftile.kvcache.states import StateRows

# the others wait for answers with drafts if these are one in four, or more
FEW_DRAFTS = 4


class ScheduledTokens(NamedTuple):
    """Tokens of one answer for the model to read: `tokens` of them from position `start`."""

    answer: Answer
    start: int
    tokens: int
    outputs: tuple[Answer, ...]
    """The answers that get their next token from the last of these tokens; none while the prompt goes on."""
    kept: tuple[tuple[int, int], ...] = ()
    """States that are kept after some of these tokens, besides the last token's: a position, and the row of states."""
    draft: Draft = NO_DRAFT
    """Guesses, which are read behind the first token; the answer gets a token from each row."""
    guess: int = -1
    """The token to read where the answer has none yet; -1 for the token that the device has drawn last."""


@dataclass(slots=True)
class StepPlan:
    """One step: what the model reads, and what must be done before."""

    work: list[ScheduledTokens] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    """Blocks to copy before the step writes into them (copy-on-write)."""
    entries: dict[tuple[int, int], int] = field(default_factory=dict)
    """New entries of the block tables on the device: a block by (slot, column)."""
    rows: dict[int, int] = field(default_factory=dict)
    """Rows that blocks have got, by block, where blocks share rows (see `WindowPool`)."""
    row_copies: list[Copy] = field(default_factory=list)
    """Rows to copy with the blocks."""
    started: list[Answer] = field(default_factory=list)
    """Answers that have got a slot."""
    states: dict[int, int] = field(default_factory=dict)
    """Rows of states to copy before the step, the source by its target: for sequences that begin, and beams."""
    states_after: dict[int, int] = field(default_factory=dict)
    """Rows of states to copy after the step: for forks, and to keep what it ends with."""


class Scheduler:
    """The requests that wait and the requests that run.

    Args:
        pool: the blocks of the KV cache.
        max_answers: the most answers that run at once; each has a slot of its own.
        max_batched_tokens: the most tokens that the model reads in one step.
        shares_answers: whether the tokens of answers, too, enter the prefix cache and are found there. They must not where they
            are computed otherwise than a prompt's: what a request finds would depend on what ran before it.
        states: the rows of states; None if no layer has a state.
        state_every: the tokens of a prompt between two states that are kept.
        speculator: drafts tokens of answers; None for none.
    """

    def __init__(
        self, pool: BlockPool, max_answers: int, max_batched_tokens: int, *, shares_answers: bool = True,
        states: StateRows | None = None, state_every: int = 8192, speculator: Speculator | None = None,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.speculator = speculator
        self.states = None if states is None else StatePlan(pool, states, state_every)
        self.max_batched_tokens = max_batched_tokens
        self.shares_answers = shares_answers
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in the order of priorities, then oldest first
        self.preemptions = 0
        # slots are taken from the end, so the lowest is used first
        self._all_slots = tuple(range(max_answers - 1, -1, -1))
        self._slots = list(self._all_slots)
        self._forked: dict[tuple[int, int], int] = {}
        self._forked_states: dict[int, int] = {}
        # the request whose prompt the step reads to its end, for answers that begin later
        self._read_now: Request | None = None

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.waiting and not self.running

    @property
    def free_slots(self) -> int:
        """How many more answers may run."""
        return len(self._slots)

    @property
    def _runs(self) -> bool:
        """Whether any answer runs."""
        return len(self._slots) < len(self._all_slots)

    def needed_by(self, prompt: int, more: int, answers: int) -> int:
        """Returns how many blocks the answers of a request take that run together; see `BlockPool.needed_by`."""
        if self.states is None:
            return self.pool.needed_by(prompt, more, answers)
        # after a preemption each reads the prompt by itself, to have a state after it
        return answers * self.pool.needed_by(prompt, more, 1)

    def add(self, request: Request) -> None:
        """Puts a request into the queue."""
        self.waiting.add(request)

    def schedule(self) -> StepPlan:
        """Plans the next step; the plan has no work if every request waits for results of the step in flight."""
        plan = StepPlan(entries=self._forked, states=self._forked_states)
        self._forked, self._forked_states = {}, {}
        self._read_now = None
        self.pool.next_step()
        budget = self._decode(plan, self.max_batched_tokens)
        budget = self._continue_prefill(plan, budget)
        self._admit(plan, budget)
        plan.row_copies = self.pool.row_copies()
        if plan.work:
            plan.rows = self.pool.new_rows()
        else:
            # a plan without work is not run, and the next one has to tell of rows and forks
            self._forked, self._forked_states = plan.entries, plan.states
        return plan

    def seal(self, answer: Answer, length: int) -> None:
        """Enters an answer's first `length` tokens, which the model has read or is about to read, into the prefix cache."""
        assert answer.table is not None
        self.pool.seal(answer.table, answer.ids, length if self.shares_answers else min(length, len(answer.request.prompt)))

    def finish(self, answer: Answer) -> None:
        """Takes back the blocks and the slot of a complete answer."""
        self._release(answer)
        request = answer.request
        if not request.live:
            self._remove(request)

    def abort(self, request: Request) -> None:
        """Takes back everything that a request has, whether it runs or waits."""
        for answer in request.answers:
            self._release(answer)
        self._remove(request)

    def reset(self) -> list[Request]:
        """Takes everything back from everybody, also after an interruption in the middle of the books; returns the requests."""
        # a request that was on its way from one queue to the other is in both
        requests = list(dict.fromkeys([*self.running, *self.waiting]))
        for answer in (answer for request in requests for answer in request.answers):
            answer.table, answer.slot, answer.planned, answer.pending, answer.read_by_draft = None, -1, 0, 0, 0
        for request in requests:
            request.kept = None
        self.running.clear()
        self.waiting.clear()
        self.pool.reset()
        self._slots = list(self._all_slots)
        self._forked, self._forked_states = {}, {}
        return requests

    def fork_beams(self, answers: list[Answer], parents: list[int]) -> None:
        """Gives each answer the blocks of its parent, after a beam search has chosen which beams go on.

        Args:
            answers: the beams.
            parents: for each beam the index of the beam that it continues.
        """
        stays = [parent == n and parents.count(n) == 1 for n, parent in enumerate(parents)]
        old = [(answer.table, answer.planned) for answer in answers]
        new = [None if (table := old[parent][0]) is None else self.pool.fork(table) for parent in parents]
        for n, answer in enumerate(answers):
            spare = new[n] if stays[n] else old[n][0]
            if spare is not None:
                self.pool.free(spare)
            if not stays[n]:
                answer.table, answer.planned = new[n], old[parents[n]][1]
                if answer.table is not None:
                    self._forked |= entries_of(answer)
                    if self.states is not None:
                        self._forked_states[answer.slot] = answers[parents[n]].slot

    def _decode(self, plan: StepPlan, budget: int) -> int:
        """Plans one token of each answer that has one unread token, and its draft; returns the budget that is left."""
        if self.speculator is not None:
            self.speculator.begin_step(self.running, budget)
            if self._all_wait():
                return budget
        for request in self.running.copy():
            if not request.prefilled:
                continue
            for answer in request.answers:
                if not (answer.slot >= 0 and answer.unread == 1 and answer.wants_more and budget):
                    continue
                # how many of the tokens of a draft will stay, only the host can say
                if answer.waits_for_host or answer.pending > 1:
                    continue
                draft = self._draft(answer)
                if answer.pending and draft.tokens:
                    # it is checked behind the last token, which may not be the one that the guess begins with
                    continue
                tokens = 1 + len(draft.tokens)
                if not self._ensure_blocks(plan, answer, tokens):
                    break
                self._reserve_rows(answer, tokens)
                plan.work.append(ScheduledTokens(answer, answer.planned, tokens, (answer,), draft=draft))
                budget -= tokens
        budget += self._complete_drafts(plan)
        for work in plan.work:
            work.answer.planned += work.tokens
            work.answer.pending += work.tokens
        return budget

    def _all_wait(self) -> bool:
        """Whether no answer is in the next step, since enough of them wait for tokens in flight, behind which drafts are made.

        An answer with a draft is not a step ahead. If the others were, their steps would be without it and its steps without
        them, and each step reads all weights. Where all wait, they lose the host's time between two steps. No prompt waits.
        """
        assert self.speculator is not None
        if not self.speculator.most or self.waiting or not all(request.prefilled for request in self.running):
            return False
        answers = [answer for request in self.running for answer in request.answers if answer.slot >= 0 and answer.wants_more]
        waiting = sum(
            answer.pending > 1 or (answer.pending == answer.unread == 1 and bool(self._draft(answer).tokens))
            for answer in answers
        )
        return waiting > 0 and waiting * FEW_DRAFTS >= len(answers)

    def _complete_drafts(self, plan: StepPlan) -> int:
        """Puts the guesses of a draft model into the plan; returns how many tokens less the plan then reads."""
        if self.speculator is None:
            return 0
        asked = [(work.answer, len(work.draft.tokens)) for work in plan.work if work.draft.tokens]
        drafts, before = self.speculator.complete(asked, plan.entries), sum(count for _, count in asked)
        if not drafts:
            return 0
        plan.work = [
            work if (draft := drafts.get(work.answer)) is None else work._replace(tokens=1 + len(draft.tokens), draft=draft)
            for work in plan.work
        ]
        return before - sum(len(draft.tokens) for draft in drafts.values())

    def _draft(self, answer: Answer) -> Draft:
        """Returns a draft for an answer, if there is room for it without a preemption."""
        if self.speculator is None:
            return NO_DRAFT
        draft = self.speculator.draft(answer)
        assert answer.table is not None
        more = answer.planned + 1 + len(draft.tokens) - answer.table.length
        return draft if self.pool.available - self.pool.needs(answer.table, max(more, 0)) >= self.pool.watermark else NO_DRAFT

    def _ensure_blocks(self, plan: StepPlan, answer: Answer, tokens: int) -> bool:
        """Makes room for the answer's next tokens, if need be by preempting the last answers.

        Returns False if the answer itself was preempted.
        """
        while True:
            assert answer.table is not None
            try:
                # an answer that is computed again after a preemption, or whose draft was refused, has its room already
                self._append(plan, answer, max(0, answer.planned + tokens - answer.table.length))
            except OutOfBlocks:
                preempted = self._preempt_last()
                if answer in preempted:
                    # other beams of its search may have been planned already
                    plan.work = [work for work in plan.work if work.answer not in preempted]
                    return False
            else:
                return True

    def _append(self, plan: StepPlan, answer: Answer, tokens: int) -> None:
        """Gives an answer room for more tokens and notes the new table entries in the plan."""
        table = answer.table
        assert table is not None
        before, count = table.blocks, len(table.blocks)
        copies = self.pool.append(table, tokens)
        plan.copies += copies
        # new are the blocks at the end, and the last old one if it was shared; a reserving pool makes all of them new
        for column in range(count - len(copies) if table.blocks is before else 0, len(table.blocks)):
            plan.entries[answer.slot, column] = table.blocks[column]

    def _reserve_rows(self, answer: Answer, tokens: int) -> None:
        """Makes rows for the next tokens of an answer, where blocks share rows."""
        assert answer.table is not None
        self.pool.cover(answer.table, answer.planned, tokens)

    def _continue_prefill(self, plan: StepPlan, budget: int) -> int:
        """Plans further chunks of running prompts; returns the budget that is left."""
        for request in self.running:
            for answer in request.answers:
                unread = answer.unread > 1 or not request.prefilled
                if unread and answer.table is not None and answer.wants_more and budget:
                    budget -= self._prefill(plan, answer, budget)
        return budget

    def _prefill(self, plan: StepPlan, answer: Answer, budget: int) -> int:
        """Plans as many unread tokens of an answer as the budget allows; returns how many.

        When the last token of a prompt is read, the request's other answers start from the same blocks, and the blocks are kept
        for those that have no slot yet.
        """
        tokens, start = min(answer.unread, budget), answer.planned
        self._reserve_rows(answer, tokens)
        answer.planned += tokens
        assert answer.table is not None
        request = answer.request
        outputs: tuple[Answer, ...] = () if answer.unread else (answer,)
        if outputs and not request.prefilled:
            outputs = tuple(each for each in request.live if each.slot >= 0)
            if request.queued:
                # this step has yet to write what an answer would copy
                self._read_now = request
                if self.states is None:
                    self._keep_prompt(request, answer.table)
            request.prefilled = True
        kept = {} if self.states is None else self.states.keep(answer, start)
        self.seal(answer, answer.planned)
        for output in outputs:
            output.pending += 1
            if output is not answer:
                output.table = self.pool.fork(answer.table)
                output.planned = answer.planned
                plan.entries |= entries_of(output)
        if self.states is not None:
            plan.states_after |= {output.slot: answer.slot for output in outputs if output is not answer}
            if (row := kept.pop(answer.planned, None)) is not None:
                plan.states_after[row] = answer.slot
        plan.work.append(ScheduledTokens(answer, start, tokens, outputs, tuple(kept.items())))
        return tokens

    def _keep_prompt(self, request: Request, table: BlockTable) -> None:
        """Keeps the blocks of a prompt that is being read, for answers that follow."""
        # before they are sealed: without the last token the last block is not full
        request.kept = self.pool.fork(table)
        self.pool.truncate(request.kept, len(request.prompt) - 1)

    def _drop_prompt(self, request: Request) -> None:
        if request.kept is not None:
            self.pool.free(request.kept)
            request.kept = None

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Starts what waits, in order, while there are slots, blocks and budget for it."""
        for request in self.running:
            if not request.queued and request.kept is None:
                continue
            budget = self._start(plan, request, budget)
            if request.queued:
                return
        while self.waiting and budget:
            request = self.waiting.head()
            # in this order an interruption cannot lose the request
            insort(self.running, request, key=lambda each: each.order)
            budget = self._start(plan, request, budget)
            if len(request.queued) == len(request.live):
                self.running.remove(request)
                return
            self.waiting.note_begun(request)
            if request.queued:
                return

    def _start(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Starts answers of a request that wait, in order and as many as fit; returns the budget that is left."""
        starting = self._next_of(request)
        readers = starting
        if not request.prefilled:
            # one reads the prompt for all
            readers = [] if any(answer.table is not None for answer in request.answers) else starting[:1]
        reserved = self._reserve(plan, request, readers if budget else [])
        if len(reserved) < len(readers):
            starting = reserved
        for answer in starting:
            answer.slot = self._slots.pop()
            plan.started.append(answer)
            if answer.table is not None:
                plan.entries |= entries_of(answer)
                if self.states is not None:
                    plan.states[answer.slot] = self.states.before(answer)
        if not request.queued:
            self._drop_prompt(request)
        for answer in reserved:
            if budget:
                budget -= self._prefill(plan, answer, budget)
        return budget

    def _next_of(self, request: Request) -> list[Answer]:
        """Returns the answers of a request that may start now: all beams of a search, or as many samples as there are slots."""
        queued = request.queued
        if request is self._read_now:
            return []
        # a preempted answer waits for its token in flight, which it must read again too
        ready = queued[: next((n for n, answer in enumerate(queued) if answer.pending), len(queued))][: len(self._slots)]
        return [] if request.search is not None and len(ready) < len(queued) else ready

    def _reserve(self, plan: StepPlan, request: Request, readers: list[Answer]) -> list[Answer]:
        """Reserves blocks for all that answers have to read; returns the first ones, which have got them.

        Of a search all get them, or none does.
        """
        for n, answer in enumerate(readers):
            # a prefix never covers the last of the tokens given
            known = answer.ids if self.shares_answers else answer.ids[: len(request.prompt) + 1]
            answer.table = self.pool.begin(known, request.cache_salt)
            if request.kept is not None:
                self._share_kept(request.kept, answer)
            elif n and readers[0].table is not None and self.states is None:
                self._share_prompt(request, readers[0].table, answer)
            missing = len(answer.ids) - answer.table.length
            # the beams of a search, too, are alone where nothing else runs: they wait for one another
            if not self._has_room(answer.table, missing, alone=not self._runs and (not n or request.search is not None)):
                lost = n if request.search is None else 0
                for other in readers[lost:]:
                    self._free_table(other)
                return readers[:lost]
            answer.planned = answer.table.length
            if request.cached_tokens is None:
                request.cached_tokens, request.paged_tokens = answer.planned, answer.table.found
                request.cache_hit = self.pool.hit_in_words(answer.table, len(request.prompt))
            plan.copies += self.pool.append(answer.table, missing)
        return readers

    def _has_room(self, table: BlockTable, tokens: int, *, alone: bool) -> bool:
        """Whether a table can have more tokens, with some blocks to spare for running answers.

        For one that is alone, with nothing that runs, prompts that are kept make room.
        """
        kept = [request for request in self.running if request.kept is not None and alone]
        while self.pool.available - self.pool.needs(table, tokens) < (0 if alone else self.pool.watermark):
            if not kept:
                return False
            self._drop_prompt(kept.pop())
        return True

    def _share_kept(self, kept: BlockTable, answer: Answer) -> None:
        """Lets an answer begin with the blocks of its prompt, unless the cache has more of its tokens."""
        assert answer.table is not None
        if answer.table.length <= kept.length:
            self.pool.free(answer.table)
            answer.table = self.pool.fork(kept)

    def _share_prompt(self, request: Request, first: BlockTable, other: Answer) -> None:
        """Lets a preempted request's other answers share the prompt's blocks of the first, which reads before them."""
        assert other.table is not None
        # it reads a token itself
        shared = min(len(request.prompt), len(other.ids) - 1) // self.pool.size * self.pool.size
        # a prefix found in the cache is as good
        if self.pool.shares and other.table.length < shared and first.sealed * self.pool.size <= shared:
            self.pool.free(other.table)
            other.table = self.pool.fork(first)
            self.pool.truncate(other.table, shared)

    def _preempt_last(self) -> list[Answer]:
        """Takes blocks back from what runs and is last: an answer, all beams of a search, or a prompt that is kept.

        Returns the answers that have lost theirs.
        """
        request = next(each for each in reversed(self.running) if each.kept is not None or each.queued != each.live)
        running = [answer for answer in request.answers if answer.slot >= 0]
        if request.kept is not None and len(running) < 2:
            self._drop_prompt(request)
            return []
        preempted = running if request.search is not None else running[-1:]
        self._preempt(request, preempted)
        return preempted

    def _preempt(self, request: Request, answers: list[Answer]) -> None:
        self.preemptions += 1
        for answer in answers:
            self._release(answer)
        if request.queued == request.live and request.kept is None:
            self.waiting.add(request)
            self.running.remove(request)

    def _remove(self, request: Request) -> None:
        self._drop_prompt(request)
        # a preempted request may be completed by its token in flight while it waits
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def _release(self, answer: Answer) -> None:
        self._free_table(answer)
        if answer.slot >= 0:
            self._slots.append(answer.slot)
            answer.slot = -1

    def _free_table(self, answer: Answer) -> None:
        if answer.table is not None:
            self.pool.free(answer.table)
            answer.table = None
            answer.planned = answer.read_by_draft = 0


def entries_of(answer: Answer) -> dict[tuple[int, int], int]:
    """Returns all blocks of an answer by (slot, column)."""
    assert answer.table is not None
    return {(answer.slot, column): block for column, block in enumerate(answer.table.blocks)}
