"""`StepInputs`: what the model reads in one step, in tensors that reach the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rooftile.engine.steps.scheduler import ScheduledTokens


class StepInputs(NamedTuple):
    """The n tokens that a step reads, the m answers that get a token from it, and its c chunks of prompts; all int64.

    The tokens of the chunks come first, then the single tokens of decoding answers.
    """

    tokens: Tensor  # (n,) token ids; -1 for a token that only the device knows, the last one of its slot
    positions: Tensor  # (n,) positions in their sequences
    slots: Tensor  # (n,) slots of their answers
    rows: Tensor  # (m,) for each output the row of the last token that it follows
    output_slots: Tensor  # (m,)
    output_positions: Tensor  # (m,) positions of the new tokens
    cu_q: Tensor  # (c + 1,) offsets of the chunks' tokens
    chunk_lengths: Tensor  # (c,) tokens of each sequence up to the end of its chunk
    chunk_slots: Tensor  # (c,)

    @classmethod
    def of(cls, works: Sequence[ScheduledTokens], *, all_chunks: bool = False, prompts_in_chunks: bool = False) -> StepInputs:
        """Lays out the work of a step, on the host.

        Args:
            works: what the model reads.
            all_chunks: whether single tokens are chunks of one.
            prompts_in_chunks: whether the tokens of prompts are.
        """
        ordered = in_reading_order(works, prompts_in_chunks=prompts_in_chunks)
        single = [work for work in ordered if is_single(work, prompts_in_chunks=prompts_in_chunks)]
        chunks = ordered[: len(ordered) - len(single)]
        if all_chunks:
            chunks, single = chunks + single, []
        cu_q = np.cumsum([0, *(work.tokens for work in chunks)])
        first = int(cu_q[-1])
        tokens, positions, slots = np.full((3, first + len(single)), -1)
        for work, begin, end in zip(chunks, cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            known = work.answer.ids[work.start : work.start + work.tokens] or [work.guess]
            tokens[begin : begin + len(known)] = known
            positions[begin:end] = np.arange(work.start, work.start + work.tokens)
            slots[begin:end] = work.answer.slot
        # one assignment for all single tokens: numpy is slow on one number at a time
        tokens[first:] = [work.answer.ids[work.start] if work.start < len(work.answer.ids) else work.guess for work in single]
        positions[first:] = [work.start for work in single]
        slots[first:] = [work.answer.slot for work in single]
        last_row = {id(work): end - 1 for work, end in zip(chunks, cu_q[1:].tolist(), strict=True)}
        last_row |= {id(work): first + n for n, work in enumerate(single)}
        outputs = [(last_row[id(work)], each.slot, work.start + work.tokens) for work in works for each in work.outputs]
        rows, output_slots, output_positions = np.array(outputs, dtype=np.int64).reshape(-1, 3).T
        ends = [(work.start + work.tokens, work.answer.slot) for work in chunks]
        chunk_lengths, chunk_slots = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        arrays = (tokens, positions, slots, rows, output_slots, output_positions, cu_q, chunk_lengths, chunk_slots)
        return cls(*map(torch.from_numpy, arrays))

    @classmethod
    def of_singles(cls, works: Sequence[ScheduledTokens]) -> StepInputs:
        """Lays out work of one token and one output each; the same as `of`, in a fraction of its time."""
        tokens, positions, slots = torch.tensor(
            [
                [work.answer.ids[work.start] if work.start < len(work.answer.ids) else work.guess for work in works],
                [work.start for work in works],
                [work.answer.slot for work in works],
            ]
        )
        none = tokens[:0]
        return cls(tokens, positions, slots, torch.arange(len(works)), slots, positions + 1, torch.zeros(1).long(), none, none)

    @classmethod
    def of_rows(cls, tokens: Tensor, positions: Tensor, slots: Tensor, *, behind: int) -> StepInputs:
        """Lays out single tokens, each with an output `behind` positions further."""
        none = slots[:0]
        outputs = torch.arange(len(slots)), slots, positions + behind
        return cls(tokens, positions, slots, *outputs, torch.zeros(1).long(), none, none)

    def to(self, device: torch.device) -> StepInputs:
        """Copies all of it to the device in one transfer, without waiting for it."""
        if device.type == "cpu":
            return self
        packed = torch.cat(self).pin_memory().to(device, non_blocking=True)
        return StepInputs(*packed.split([len(part) for part in self]))


class Chunks(NamedTuple):
    """The chunks of prompts in a step, as attention reads them from the cache."""

    tokens: int
    """Tokens of all chunks together; they come first among the step's tokens."""
    table: Tensor
    lengths: Tensor
    cu_q: Tensor


def is_single(work: ScheduledTokens, *, prompts_in_chunks: bool = False) -> bool:
    """Whether work is a single token, read as the tokens of decoding answers are; a prompt's may be a chunk of one instead."""
    return work.tokens == 1 and not (prompts_in_chunks and work.start < len(work.answer.request.prompt))


def rows_of_drafts(works: Sequence[ScheduledTokens]) -> Sequence[ScheduledTokens]:
    """Returns work in which each drafted token is a single token of its own, with an output of its own."""
    if not any(work.draft.tokens for work in works):
        return works
    found: list[ScheduledTokens] = []
    for work in works:
        if not work.draft.tokens:
            found.append(work)
            continue
        guesses = (-1, *work.draft.tokens)
        found += [ScheduledTokens(work.answer, work.start + n, 1, work.outputs, guess=guess) for n, guess in enumerate(guesses)]
    return found


def in_reading_order(works: Sequence[ScheduledTokens], *, prompts_in_chunks: bool = False) -> list[ScheduledTokens]:
    """Returns chunks of prompts first, then single tokens: the order of a step's rows."""
    return sorted(works, key=lambda work: is_single(work, prompts_in_chunks=prompts_in_chunks))


def split_prompts(works: Sequence[ScheduledTokens]) -> list[ScheduledTokens]:
    """Cuts work into the part that is a prompt's and the single tokens of the answer.

    An answer is read in chunks when it is computed again after a preemption. Where prompts and answers are computed in different
    ways, its tokens must be computed one by one, as they were before.
    """
    found: list[ScheduledTokens] = []
    for work in works:
        end = work.start + work.tokens
        prompt = min(len(work.answer.request.prompt), end)
        parts = [(work.start, prompt - work.start)] if work.start < prompt else []
        parts += [(n, 1) for n in range(max(prompt, work.start), end)]
        found += [ScheduledTokens(work.answer, *part, ()) for part in parts[:-1]]
        found.append(ScheduledTokens(work.answer, *parts[-1], work.outputs))
    return found
