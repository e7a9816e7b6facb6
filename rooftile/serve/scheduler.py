"""What the model reads next: decoding first, then prompts by chunks, then new requests; all in plain Python.

A step mixes one token of each running answer with chunks of prompts, `max_batched_tokens` in all. When the pool has no block left
for a running answer, the newest request gives its blocks up and waits again, at the front; it is computed anew, what of it is
still in the prefix index excepted. A request with several answers has its prompt read once, runs and waits as one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rooftile.kvcache import BlockPool, Copy, OutOfBlocks
from rooftile.serve.request import Answer, Request


class Work(NamedTuple):
    """Tokens of an answer, from `start` on, for the model to read."""

    answer: Answer
    start: int
    tokens: int
    heirs: tuple[Answer, ...]
    """The answers that get a next token from the last of them; none if the prompt goes on."""


@dataclass(slots=True)
class Plan:
    """A step: what the model reads, and what must be put in place before."""

    work: list[Work] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    entries: dict[tuple[int, int], int] = field(default_factory=dict)
    """What block tables hold from now on: a block, by slot and column."""
    started: list[Answer] = field(default_factory=list)
    """Answers that have a new slot."""


class Scheduler:
    """Requests that wait and requests that run.

    Args:
        pool: the blocks of the cache.
        max_answers: how many run at once, each in a slot of its own.
        max_batched_tokens: of a step.
    """

    def __init__(self, pool: BlockPool, max_answers: int, max_batched_tokens: int) -> None:
        self.pool = pool
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.preemptions = 0
        # taken from the end: the lowest first
        self._slots = list(range(max_answers - 1, -1, -1))
        self._moved: dict[tuple[int, int], int] = {}

    @property
    def idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """The next step; of no work if nothing can be done before more results are known."""
        plan = Plan(entries=self._moved)
        self._moved = {}
        budget = self._decode(plan, self.max_batched_tokens)
        budget = self._read_on(plan, budget)
        self._admit(plan, budget)
        return plan

    def finish(self, answer: Answer) -> None:
        """Takes back what a complete answer has."""
        self._release(answer)
        request = answer.request
        if not request.live:
            self._leave(request)

    def abort(self, request: Request) -> None:
        """Takes back what a request has, wherever it is."""
        for answer in request.answers:
            self._release(answer)
        self._leave(request)

    def adopt(self, answers: list[Answer], parents: list[int]) -> None:
        """Lets each answer go on from the blocks of its parent: a search has chosen among its beams' successors."""
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
                    self._moved |= entries_of(answer)

    def _decode(self, plan: Plan, budget: int) -> int:
        """A token of each answer that has read all but one."""
        for request in self.running.copy():
            for answer in request.answers:
                if not (request.begun and answer.slot >= 0 and answer.behind == 1 and answer.wants_more and budget):
                    continue
                if not self._grown(plan, answer):
                    break
                plan.work.append(Work(answer, answer.planned, 1, (answer,)))
                budget -= 1
        for work in plan.work:
            work.answer.planned += 1
            work.answer.pending += 1
        return budget

    def _grown(self, plan: Plan, answer: Answer) -> bool:
        """Room for the answer's next token; the newest requests make way. False if it had to go itself."""
        while True:
            assert answer.table is not None
            try:
                # what is computed anew has its room already
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
        table = answer.table
        assert table is not None
        before, count = table.blocks, len(table.blocks)
        copies = self.pool.append(table, tokens)
        plan.copies += copies
        # new are those at the end, and the last one if it was shared; or all, as a reserving pool does it
        for column in range(count - len(copies) if table.blocks is before else 0, len(table.blocks)):
            plan.entries[answer.slot, column] = table.blocks[column]

    def _read_on(self, plan: Plan, budget: int) -> int:
        """Chunks of prompts that are being read."""
        for request in self.running:
            for answer in request.answers:
                reads = answer.table is not None and answer.wants_more and (answer.behind > 1 or not request.begun)
                if reads and budget:
                    budget -= self._read(plan, answer, budget)
        return budget

    def _read(self, plan: Plan, answer: Answer, budget: int) -> int:
        """As much of what an answer is behind as the budget allows; after the last of a prompt its other answers begin."""
        tokens = min(answer.behind, budget)
        start = answer.planned
        answer.planned += tokens
        assert answer.table is not None
        self.pool.seal(answer.table, answer.ids[: answer.planned])
        heirs: tuple[Answer, ...] = ()
        if not answer.behind:
            heirs = (answer,) if answer.request.begun else tuple(answer.request.answers)
            answer.request.begun = True
            for heir in heirs:
                heir.pending += 1
                if heir is not answer:
                    heir.table = self.pool.fork(answer.table)
                    heir.planned = answer.planned
                    plan.entries |= entries_of(heir)
        plan.work.append(Work(answer, start, tokens, heirs))
        return tokens

    def _admit(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget:
            request = self.waiting[0]
            # what is being computed of a preempted request is part of what it must read again
            if request.pending or len(request.live) > len(self._slots) or not self._housed(request):
                return
            self.waiting.popleft()
            self.running.append(request)
            for answer in request.live:
                answer.slot = self._slots.pop()
                plan.started.append(answer)
                if answer.table is not None:
                    plan.entries |= entries_of(answer)
            for answer in [answer for answer in request.live if answer.table is not None]:
                if budget:
                    budget -= self._read(plan, answer, budget)

    def _housed(self, request: Request) -> bool:
        """Room for all that a request has to read, with some to spare for those that run; or nothing has changed."""
        readers = request.live if request.begun else request.live[:1]
        for answer in readers:
            answer.table = self.pool.begin(answer.ids, request.salt)
            if answer is not readers[0]:
                self._share(request, readers[0], answer)
            answer.planned = answer.table.length
            missing = len(answer.ids) - answer.table.length
            spare = self.pool.watermark if self.running else 0
            if self.pool.available - self.pool.needs(answer.table, missing) < spare:
                for other in readers:
                    self._free_table(other)
                return False
            self.pool.append(answer.table, missing)
        return True

    def _share(self, request: Request, first: Answer, other: Answer) -> None:
        """Lets an answer that comes back have its prompt from the first one, which reads before it, unless it is cached."""
        assert first.table is not None
        assert other.table is not None
        shared = len(request.prompt) // self.pool.size * self.pool.size
        if self.pool.shares and other.table.length < shared and first.table.sealed * self.pool.size <= shared:
            self.pool.free(other.table)
            other.table = self.pool.fork(first.table)
            self.pool.truncate(other.table, shared)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        for answer in request.answers:
            self._release(answer)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        # one that was preempted may be completed by what was being computed of it: it waits then
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
    """All blocks of an answer, by slot and column."""
    assert answer.table is not None
    return {(answer.slot, column): block for column, block in enumerate(answer.table.blocks)}
