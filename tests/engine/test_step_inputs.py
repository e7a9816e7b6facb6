"""The inputs of a step: chunks first, then single tokens, and each output's row."""

from __future__ import annotations

import torch

from rooftile.engine.requests.request import Answer, Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps.scheduler import ScheduledTokens
from rooftile.engine.steps.step_inputs import StepInputs


def answer_of(ids: list[int], slot: int) -> Answer:
    request = Request(slot, ids, SamplingParams(), 10, frozenset())
    return Answer(request, 0, 0, ids, slot=slot)


def test_chunks_come_first_and_outputs_keep_the_order_of_the_plan() -> None:
    decoding, waiting, reading, done = (answer_of([10 * n + i for i in range(5)], n) for n in range(4))
    works = [
        ScheduledTokens(decoding, 4, 1, (decoding,)),
        # its token is still on the device
        ScheduledTokens(waiting, 5, 1, (waiting,)),
        # a prompt that goes on
        ScheduledTokens(reading, 1, 2, ()),
        # a prompt that ends: two answers get a token from its last one
        ScheduledTokens(done, 2, 3, (done, answer_of([], 7))),
    ]
    found = [part.tolist() for part in StepInputs.of(works)]
    assert found == [
        [21, 22, 32, 33, 34, 4, -1],
        [1, 2, 2, 3, 4, 4, 5],
        [2, 2, 3, 3, 3, 0, 1],
        [5, 6, 4, 4],
        [0, 1, 3, 7],
        [5, 6, 5, 5],
        [0, 2, 5],
        [3, 5],
        [2, 3],
    ]


def test_one_copy_carries_everything(monkeypatch) -> None:
    """On a GPU the nine tensors are packed into one; the parts of the copy have their old shapes and contents."""
    sent = []

    def to(self, *given, **options):
        sent.append(self)
        return self

    work = ScheduledTokens(answer_of([1, 2, 3], 0), 0, 3, (answer_of([1, 2, 3], 0),))
    inputs = StepInputs.of([work])
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    found = inputs.to(torch.device("cuda"))
    assert len(sent) == 1
    assert [part.tolist() for part in found] == [part.tolist() for part in inputs]
