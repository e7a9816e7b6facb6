"""`HeadRunner`: runs a head as a draft model is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.steps.runner import Runner
from rooftile.models.drafts.head import DraftHead


class HeadRunner(Runner):
    """A runner whose rows are pairs: the features of a position, and the token behind it, from which it draws one more.

    A token that the host knows has the model's features; one that was drawn here has what this head left for its slot.
    """

    behind = 2

    def __init__(self, head: DraftHead, *given: Any, beside: Runner, **settings: Any) -> None:
        # it has what a runner asks of a decoder
        super().__init__(head, *given, beside=beside, **settings)  # type: ignore[arg-type]
        assert beside.features is not None
        self._head, self._given = head, beside.features
        self._left = torch.zeros(len(self.table), head.config.hidden, dtype=head.embedding.dtype, device=self.device)

    def _compute(self, tokens: Tensor, drawn: Tensor, places: Tensor, step: StepTokens) -> Tensor:
        own = self._left.index_select(0, step.slots)
        features = torch.where(drawn[:, None], own, self._given.read(step.cells))
        hidden, left = self._head(tokens, places, features, self.layers.on(step), self._multiply)
        # the rows of a slot are neighbours, and the last one counts
        last = torch.cat((step.slots[1:] != step.slots[:-1], torch.ones_like(drawn[:1])))
        self._left.index_copy_(0, torch.where(last, step.slots, self.pad_slot), left)
        return hidden
