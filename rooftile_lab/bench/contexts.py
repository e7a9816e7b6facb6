"""Decode steps at long contexts whose prompts are not read: a model's time to decode does not depend on what its caches hold.

Reading the prompts would take minutes of a GPU, and what is timed are the steps after them. Blocks, slots and tables are those of
an engine that has read the prompts; keys, values and states are random numbers, since zeros draw less power.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rooftile.diagnosis.programs.decode_step import DecodeSizes, decoding
from rooftile.engine.engine import Engine
from rooftile.engine.llm import LLM
from rooftile.engine.steps.step_inputs import Chunks

# tokens of each sequence
CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
BATCH = 8
STEPS = 32


def contexts_for(scale: float, longest: int) -> list[int]:
    """The contexts that are measured, scaled down for a smaller machine, for which a model has positions."""
    return [context for full in CONTEXTS if (context := max(round(full * scale), STEPS + 1)) + STEPS <= longest]


def engine_for(decoder: Any, contexts: list[int], batch: int) -> LLM:
    """An engine for this many sequences of the longest context, if they fit; its blocks hold random numbers."""
    # one more leaves the blocks that are kept free for sequences that grow
    llm = LLM(decoder, max_model_len=max(contexts) + STEPS, max_num_seqs=batch + 1)
    generator = torch.Generator(llm.pages.storage.device).manual_seed(0)
    for blocks in llm.pages.storage.split(32):
        # float8 has no random numbers of its own
        blocks.copy_(torch.empty(blocks.shape, dtype=torch.float32, device=blocks.device).normal_(generator=generator))
    return llm


def sequence_bytes(llm: LLM, context: int) -> int:
    """The bytes of a sequence's keys, values and states."""
    pages, states, pool = llm.pages, llm.caches.states, llm.engine.pool
    block = pages.nbytes // pages.storage.shape[0]
    fixed = 0 if states is None else sum(memory[:, :1].nbytes for memory in states.memory.values())
    return pool.blocks_of(context) * block + fixed


def most_sequences(llm: LLM, context: int) -> int:
    """How many sequences of this length the engine's caches have blocks for."""
    pool = llm.engine.pool
    return (pool.total - pool.watermark) // pool.blocks_of(context + STEPS)


def milliseconds(llm: LLM, batch: int, context: int) -> float:
    """Milliseconds per step of `batch` sequences that all decode with `context` tokens."""
    engine, sizes = llm.engine, DecodeSizes(batch, context, STEPS)
    with unread_prompts(engine), decoding(engine, sizes):
        states = llm.caches.states
        for memory in () if states is None else states.memory.values():
            memory[:, : engine.max_answers].normal_()
        engine.step()
        _wait(engine)
        began = perf_counter()
        for _ in range(STEPS):
            engine.step()
        _wait(engine)
        return (perf_counter() - began) / STEPS * 1e3


@contextmanager
def unread_prompts(engine: Engine) -> Iterator[None]:
    """Lets the engine skip the model in steps that read chunks of prompts; steps of single tokens run as ever.

    One step reads all prompts, so that none decodes while others are read.
    """
    runner: Any = engine.runner
    forward, budget = runner._forward, engine.scheduler.max_batched_tokens

    def skip(tokens: Tensor, positions: Tensor, slots: Tensor, chunks: Chunks | None, *more: Any, **named: Any) -> Tensor:
        if chunks is None:
            found: Tensor = forward(tokens, positions, slots, chunks, *more, **named)
            return found
        embedding = runner.decoder.embedding
        one = torch.zeros(1, runner.decoder.config.hidden, dtype=embedding.dtype, device=embedding.device)
        return one.expand(len(tokens), -1)

    runner._forward, engine.scheduler.max_batched_tokens = skip, 1 << 31
    try:
        yield
    finally:
        del runner._forward
        engine.scheduler.max_batched_tokens = budget


def _wait(engine: Engine) -> None:
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.device)
