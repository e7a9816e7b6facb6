"""`Step`: one step in integers, all that a device needs to run it.

Rank 0 makes it of a `StepPlan`. Ranks that share a model with it get it as one flat buffer (`encode`, `decode`), and know neither
requests nor answers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.sampling.new_slots import NewSlots
from rooftile.engine.steps.rounds import Mark, MarkedChunk
from rooftile.engine.steps.step_inputs import StepInputs


class Step(NamedTuple):
    """One step; all tensors are int64 and on the host."""

    inputs: StepInputs
    """The tokens that the model reads."""
    started: NewSlots
    """Slots that begin with an answer."""
    facts: Tensor
    """(3,): the features of the draw, whether all work is one token and one output, and `tops`."""
    entries: Tensor
    """(3, k): slots, columns and blocks, new entries of the block tables."""
    copies: Tensor
    """(2, k): blocks to copy before the step, sources and targets."""
    rows: Tensor
    """(2, k): blocks, and the rows that they have got (see `WindowPool`)."""
    row_copies: Tensor
    """(2, k): rows to copy with the blocks, sources and targets."""
    states: Tensor
    """(2, k): rows of states to copy before the step, targets and sources."""
    states_after: Tensor
    """(2, k): the same after it."""
    marks: Tensor
    """(3, k): states to keep on the way: slots, tokens before them, and rows of states."""
    bans: Tensor
    """(2, k): rows of outputs, and tokens that they may not get."""
    depths: Tensor
    """(m,): for each output how many drafted tokens its row follows; (0,) where nothing was drafted."""
    masked: Tensor
    """(2, k): slots whose masks change, and how many drafted tokens are followed."""
    masks: Tensor
    """(k, words): for each of them a bit per token that may come next, the lowest first, in words of 64."""
    scored: Tensor
    """(3, k): prompts whose tokens' logprobs are asked for: the first row, how many rows, and how many likely tokens each."""
    following: Tensor
    """(total,): the tokens that follow those rows."""
    adapters: Tensor
    """(n,): the slot of each token's adapter, -1 for none; (0,) if no token has one."""

    @property
    def features(self) -> SamplingFeatures:
        """The union of what the outputs ask for."""
        return SamplingFeatures.of_bits(int(self.facts[0]))

    @property
    def only_decodes(self) -> bool:
        """Whether each answer in it reads one token and gets one, so that a graph can run it."""
        return bool(self.facts[1])

    @property
    def tops(self) -> int | None:
        """How many of the most likely tokens each output tells; None if no output tells its logprob."""
        tops = int(self.facts[2])
        return None if tops < 0 else tops

    def chunks(self) -> list[MarkedChunk]:
        """Returns the chunks, with the states that are kept within them."""
        marks: dict[int, list[tuple[int, int]]] = {}
        for slot, end, row in self.marks.T.tolist():
            marks.setdefault(slot, []).append((end, row))
        found = []
        for slot, end, tokens in zip(
            self.inputs.chunk_slots.tolist(), self.inputs.chunk_lengths.tolist(), self.inputs.cu_q.diff().tolist(), strict=True
        ):
            kept = tuple(Mark(place - end + tokens, row) for place, row in marks.get(slot, ()))
            found.append(MarkedChunk(tokens, slot, kept))
        return found


# the parts of a step that are several tensors
_PARTS: dict[str, type[StepInputs] | type[NewSlots]] = {"inputs": StepInputs, "started": NewSlots}
_TENSORS = sum(len(_PARTS[name]._fields) if name in _PARTS else 1 for name in Step._fields)


def encode(step: Step) -> Tensor:
    """Returns a step as one flat int64 buffer: rows and columns of each tensor, and then their numbers."""
    tensors = [tensor for part in step for tensor in ((part,) if isinstance(part, Tensor) else part)]
    # a tensor of one dimension has -1 rows
    shapes = [n for tensor in tensors for n in (-1, *tensor.shape)[-2:]]
    return torch.cat((torch.tensor(shapes), *(tensor.reshape(-1) for tensor in tensors)))


def decode(buffer: Tensor) -> Step:
    """Returns the step of a buffer; its tensors are views of the buffer."""
    shapes = buffer[: 2 * _TENSORS].view(_TENSORS, 2).tolist()
    numbers = buffer[2 * _TENSORS :].split([abs(rows) * columns for rows, columns in shapes])
    tensors = iter([x if rows < 0 else x.view(rows, columns) for x, (rows, columns) in zip(numbers, shapes, strict=True)])
    parts: list[Any] = []
    for name in Step._fields:
        kind = _PARTS.get(name)
        parts.append(next(tensors) if kind is None else kind(*(next(tensors) for _ in kind._fields)))
    return Step(*parts)
