"""`EngineStats`: how an engine stands after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # a server's process reads the counts without torch
    from rooftile.engine.engine import Engine


class EngineStats(NamedTuple):
    """An engine after a step; counts are those since its start.

    Args:
        running: answers that the model computes.
        waiting: answers that wait for their first step, or for one after a preemption.
        waiting_tokens: prompt tokens of the requests of which no answer runs.
        free_blocks, used_blocks, cached_blocks: blocks of the KV cache by what they hold: nothing, a running request's tokens,
            or tokens that only the prefix cache still knows.
        waste: the share of the slots in used blocks that hold no token.
        steps, tokens: steps that the engine ran, and tokens that it read and wrote in them.
        preemptions: how often a running answer, or a search, had to give its blocks back.
        prefix_queries, prefix_hits: tokens of the prompts that the model has begun to read, and how many of them the prefix
            cache had.
        prefix_pages: how many of them had their blocks there; without a state in the same place they were read again.
        kept_states: states that are kept for prefixes, where layers have states.
        drafts, drafted, accepted: drafts that the engine has checked, their tokens, and those of them that were accepted.
        draft_tokens: how many tokens a draft may have now; 0 where drafts do not pay.
        step_s, host_s: seconds of the last step, and of the work beside it: orders in, news out.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    waste: float = 0.0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_pages: int = 0
    kept_states: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_tokens: int = 0
    step_s: float = 0.0
    host_s: float = 0.0


def stats_of(engine: Engine) -> EngineStats:
    """Returns how an engine stands, but for the counts of its loop; called by the thread that runs its steps."""
    scheduler, pool = engine.scheduler, engine.pool
    # an answer gives its table back when it ends; each that runs has a slot, also before it has a table
    answers = [answer for request in scheduler.running for answer in request.answers]
    held = [(len(answer.table.blocks), answer.planned) for answer in answers if answer.table is not None]
    empty = sum([blocks for blocks, _ in held]) * pool.size - sum([tokens for _, tokens in held])
    used = pool.used_blocks
    drafts = {} if engine.speculator is None else dict(engine.speculator.counts) | {"draft_tokens": engine.speculator.most}
    return EngineStats(
        engine.max_answers - scheduler.free_slots, *waiting_in(engine), pool.free_blocks, used, pool.cached_blocks,
        min(1.0, max(0, empty) / (used * pool.size)) if used else 0.0,
        engine.steps["steps"], engine.steps["tokens"], scheduler.preemptions,
        kept_states=0 if pool.snapshots is None else pool.snapshots.kept, **drafts,
    )  # fmt: skip


def waiting_in(engine: Engine) -> tuple[int, int]:
    """Returns the answers that wait, and their prompts' tokens; called by the thread that runs the engine's steps."""
    scheduler = engine.scheduler
    queued = sum(len(request.queued) for request in [*scheduler.running, *scheduler.waiting])
    return queued, sum(len(request.prompt) for request in scheduler.waiting)
