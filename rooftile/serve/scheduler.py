"""Decides what the model reads in the next step (continuous batching), in plain Python without a tensor.

A step mixes one token of each decoding answer with chunks of prompts (chunked prefill), `max_batched_tokens` in all. Decoding
comes first, then prompts that are partly read, then new requests.

When the pool has no block left for a running answer, the newest request is preempted: it gives up its blocks and waits again, at
the head of the queue. Later it is computed again, except for what the prefix cache still holds. The answers of one request run
and wait together, and its prompt is read once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rooftile.kvcache import BlockPool, Copy, OutOfBlocks
from rooftile.serve.request import Answer, Request


class Work(NamedTuple):
    """Tokens of one answer for the model to read: `tokens` of them from position `start`."""

    answer: Answer
    start: int
    tokens: int
    outputs: tuple[Answer, ...]
    """The answers that get their next token from the last of these tokens; none while the prompt goes on."""


@dataclass(slots=True)
class Plan:
    """One step: what the model reads, and what must be done before."""

    work: list[Work] = field(default_factory=list)
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


class Scheduler:
    """The requests that wait and the requests that run.

    Args:
        pool: the blocks of the KV cache.
        max_answers: the most answers that run at once; each has a slot of its own.
        max_batched_tokens: the most tokens that the model reads in one step.
        shares_answers: whether the tokens of answers, too, enter the prefix cache and are found there. They must not where they
            are computed otherwise than a prompt's: what a request finds would depend on what ran before it.
    """

    def __init__(self, pool: BlockPool, max_answers: int, max_batched_tokens: int, *, shares_answers: bool = True) -> None:
        self.pool = pool
        self.max_batched_tokens = max_batched_tokens
        self.shares_answers = shares_answers
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0
        # slots are taken from the end, so the lowest is used first
        self._all_slots = tuple(range(max_answers - 1, -1, -1))
        self._slots = list(self._all_slots)
        self._forked: dict[tuple[int, int], int] = {}

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.waiting and not self.running

    @property
    def free_slots(self) -> int:
        """How many more answers may run."""
        return len(self._slots)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Plans the next step; the plan has no work if every request waits for results of the step in flight."""
        plan = Plan(entries=self._forked)
        self._forked = {}
        self.pool.next_step()
        budget = self._decode(plan, self.max_batched_tokens)
        budget = self._continue_prefill(plan, budget)
        self._admit(plan, budget)
        plan.row_copies = self.pool.row_copies()
        if plan.work:
            # a plan without work is not run, and the next one has to tell of its rows
            plan.rows = self.pool.new_rows()
        return plan

    def seal(self, answer: Answer, length: int) -> None:
        """Enters an answer's first `length` tokens, which the model has read or is about to read, into the prefix cache."""
        assert answer.table is not None
        self.pool.seal(answer.table, answer.ids[: length if self.shares_answers else min(length, len(answer.request.prompt))])

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
            answer.table, answer.slot, answer.planned, answer.pending = None, -1, 0, 0
        self.running.clear()
        self.waiting.clear()
        self.pool.reset()
        self._slots = list(self._all_slots)
        self._forked = {}
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

    def _decode(self, plan: Plan, budget: int) -> int:
        """Plans one token of each answer that has one unread token; returns the budget that is left."""
        for request in self.running.copy():
            for answer in request.answers:
                if not (request.prefilled and answer.slot >= 0 and answer.unread == 1 and answer.wants_more and budget):
                    continue
                if answer.pending and request.sits_out:
                    continue
                if not self._ensure_block(plan, answer):
                    break
                self._cover(answer, 1)
                plan.work.append(Work(answer, answer.planned, 1, (answer,)))
                budget -= 1
        for work in plan.work:
            work.answer.planned += 1
            work.answer.pending += 1
        return budget

    def _ensure_block(self, plan: Plan, answer: Answer) -> bool:
        """Makes room for the answer's next token, if need be by preempting the newest requests.

        Returns False if the answer's own request was preempted.
        """
        while True:
            assert answer.table is not None
            try:
                # an answer that is computed again after a preemption has its room already
                self._append(plan, answer, answer.planned + 1 - answer.table.length)
            except OutOfBlocks:
                newest = self.running[-1]
                self._preempt(newest)
                if newest is answer.request:
                    plan.work = [work for work in plan.work if work.answer.request is not newest]
                    return False
            else:
                return True

    def _append(self, plan: Plan, answer: Answer, tokens: int) -> None:
        """Gives an answer room for more tokens and notes the new table entries in the plan."""
        table = answer.table
        assert table is not None
        before, count = table.blocks, len(table.blocks)
        copies = self.pool.append(table, tokens)
        plan.copies += copies
        # new are the blocks at the end, and the last old one if it was shared; a reserving pool makes all of them new
        for column in range(count - len(copies) if table.blocks is before else 0, len(table.blocks)):
            plan.entries[answer.slot, column] = table.blocks[column]

    def _cover(self, answer: Answer, tokens: int) -> None:
        """Makes rows for the next tokens of an answer, where blocks share rows."""
        assert answer.table is not None
        self.pool.cover(answer.table, answer.planned, tokens)

    def _continue_prefill(self, plan: Plan, budget: int) -> int:
        """Plans further chunks of running prompts; returns the budget that is left."""
        for request in self.running:
            for answer in request.answers:
                reads = answer.table is not None and answer.wants_more and (answer.unread > 1 or not request.prefilled)
                if reads and budget:
                    budget -= self._prefill(plan, answer, budget)
        return budget

    def _prefill(self, plan: Plan, answer: Answer, budget: int) -> int:
        """Plans as many unread tokens of an answer as the budget allows; returns how many.

        When the last token of a prompt is read, the request's other answers start from the same blocks.
        """
        tokens = min(answer.unread, budget)
        start = answer.planned
        self._cover(answer, tokens)
        answer.planned += tokens
        assert answer.table is not None
        self.seal(answer, answer.planned)
        outputs: tuple[Answer, ...] = ()
        if not answer.unread:
            outputs = (answer,) if answer.request.prefilled else tuple(answer.request.answers)
            answer.request.prefilled = True
            for output in outputs:
                output.pending += 1
                if output is not answer:
                    output.table = self.pool.fork(answer.table)
                    output.planned = answer.planned
                    plan.entries |= entries_of(output)
        plan.work.append(Work(answer, start, tokens, outputs))
        return tokens

    def _admit(self, plan: Plan, budget: int) -> None:
        """Starts waiting requests, in order, while there are slots, blocks and budget for them."""
        while self.waiting and budget:
            request = self.waiting[0]
            # a preempted request waits for its token in flight, which it must read again too
            if request.pending or len(request.live) > len(self._slots) or not self._reserve(request):
                return
            # in this order an interruption cannot lose the request
            self.running.append(request)
            self.waiting.popleft()
            for answer in request.live:
                answer.slot = self._slots.pop()
                plan.started.append(answer)
                if answer.table is not None:
                    plan.entries |= entries_of(answer)
            for answer in [answer for answer in request.live if answer.table is not None]:
                if budget:
                    budget -= self._prefill(plan, answer, budget)

    def _reserve(self, request: Request) -> bool:
        """Reserves blocks for all that a request has to read, with some to spare for running requests; or changes nothing."""
        readers = request.live if request.prefilled else request.live[:1]
        for answer in readers:
            # a prefix never covers the last of the tokens given
            known = answer.ids if self.shares_answers else answer.ids[: len(request.prompt) + 1]
            answer.table = self.pool.begin(known, request.cache_salt)
            if answer is not readers[0]:
                self._share_prompt(request, readers[0], answer)
            answer.planned = answer.table.length
            cached = answer.table.length if request.cached_tokens is None else request.cached_tokens
            missing = len(answer.ids) - answer.table.length
            spare = self.pool.watermark if self.running else 0
            if self.pool.available - self.pool.needs(answer.table, missing) < spare:
                for other in readers:
                    self._free_table(other)
                return False
            self.pool.append(answer.table, missing)
            request.cached_tokens = cached
        return True

    def _share_prompt(self, request: Request, first: Answer, other: Answer) -> None:
        """Lets a preempted request's other answers share the prompt's blocks of the first, which reads before them."""
        assert first.table is not None
        assert other.table is not None
        shared = len(request.prompt) // self.pool.size * self.pool.size
        # a prefix found in the cache is as good
        if self.pool.shares and other.table.length < shared and first.table.sealed * self.pool.size <= shared:
            self.pool.free(other.table)
            other.table = self.pool.fork(first.table)
            self.pool.truncate(other.table, shared)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        for answer in request.answers:
            self._release(answer)
        self.waiting.appendleft(request)
        self.running.remove(request)

    def _remove(self, request: Request) -> None:
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
            answer.planned = 0


def entries_of(answer: Answer) -> dict[tuple[int, int], int]:
    """Returns all blocks of an answer by (slot, column)."""
    assert answer.table is not None
    return {(answer.slot, column): block for column, block in enumerate(answer.table.blocks)}
