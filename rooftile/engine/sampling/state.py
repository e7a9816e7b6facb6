"""The sampler's state on the device: the parameters and token counts of the running sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.sampling.new_slots import NewSlots, fractions


class SamplingState:
    """The sampling parameters and token counts of all running sequences, on the device, in one row (a slot) each.

    New slots are greedy. A table as wide as the vocabulary is made when the first request needs it, and never moves after that:
    a captured CUDA graph may hold its address.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        # (7, slots) in one tensor, so that a request's numbers arrive in one copy
        numbers = torch.zeros(7, slots, device=device)
        top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        seed, last = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self._hold(vocab, numbers, top_k, seed, last, None, None, None, None)
        self.top_p.fill_(1)
        self.repetition.fill_(1)

    @classmethod
    def of_tensors(cls, vocab: int, *tensors: Any) -> SamplingState:
        """Makes a state of the `tensors` of another state, which cross an operator's schema one by one."""
        state = cls.__new__(cls)
        state._hold(vocab, *tensors)
        return state

    def beside(self, vocab: int) -> SamplingState:
        """Returns a state for the draws of another model: the same parameters and seeds, of requests to come too.

        It has last tokens of its own, and neither penalties nor biases nor masks.
        """
        return self.of_tensors(vocab, self._numbers, self.top_k, self.seed, torch.zeros_like(self.last), None, None, None, None)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Everything that the state holds, for `of_tensors`."""
        return (self._numbers, self.top_k, self.seed, self.last, self.counts, self.prompted, self.bias, self.masks)

    def _hold(
        self, vocab: int, numbers: Tensor, top_k: Tensor, seed: Tensor, last: Tensor, counts: Tensor | None,
        prompted: Tensor | None, bias: Tensor | None, masks: Tensor | None,
    ) -> None:  # fmt: skip
        self.slots, self.vocab, self.device = numbers.shape[1], vocab, numbers.device
        self._numbers: Tensor = numbers
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition, self.biased = numbers
        self.top_k: Tensor = top_k
        self.seed: Tensor = seed
        # the token that each slot was given last, for the model to read next; always one of the vocabulary
        self.last: Tensor = last
        # (slots, vocab) each: how often a token was generated, whether it is in the prompt, the bias of its logit
        self.counts: Tensor | None = counts
        self.prompted: Tensor | None = prompted
        self.bias: Tensor | None = bias
        # (slots, words) int32: a bit for each token that may be drawn, the lowest first
        self.masks: Tensor | None = masks

    def prepare(self, features: SamplingFeatures) -> None:
        """Makes the tables that `features` need, where they are missing; call it before a CUDA graph is captured."""
        shape = (self.slots, self.vocab)
        if features.penalties and self.counts is None:
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.prompted = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if features.bias and self.bias is None:
            self.bias = torch.zeros(shape, device=self.device)
        if features.mask and self.masks is None:
            self.masks = torch.full((self.slots, words_of(self.vocab)), -1, dtype=torch.int32, device=self.device)

    @staticmethod
    def table_bytes(slots: int, vocab: int) -> int:
        """Returns the bytes of all tables that `prepare` may make."""
        per_token = torch.int32.itemsize + torch.bool.itemsize + torch.float32.itemsize
        return slots * (vocab * per_token + words_of(vocab) * torch.int32.itemsize)

    def set(self, new: NewSlots) -> None:
        """Gives slots to requests; nothing of the slots' former requests remains."""
        if not new.numbers.shape[1]:
            return
        self.prepare(new.features)
        packed = self._send(new.numbers)
        where = packed[0]
        self.seed.index_copy_(0, where, packed[1])
        self.top_k.index_copy_(0, where, packed[2].int())
        self._numbers.index_copy_(1, where, fractions(packed[4:]))
        for table in (self.counts, self.prompted, self.bias):
            if table is not None:
                table.index_fill_(0, where, 0)
        if self.masks is not None:
            self.masks.index_fill_(0, where, -1)
        if self.counts is not None and self.prompted is not None and new.prompted.numel():
            slots, tokens = self._send(new.prompted)
            self.prompted.index_put_((slots, tokens), torch.ones((), dtype=torch.bool, device=self.device))
            slots, tokens = self._send(new.counted)
            self.counts.index_put_((slots, tokens), torch.ones_like(slots, dtype=torch.int32), accumulate=True)
        if self.bias is not None and new.allowed.numel():
            slots, tokens = self._send(new.allowed)
            self.bias.index_fill_(0, slots, -torch.inf)
            self.bias.index_put_((slots, tokens), torch.zeros((), device=self.device))
        if self.bias is not None and new.biases.numel():
            slots, tokens, values = self._send(new.biases)
            self.bias.index_put_((slots, tokens), fractions(values))

    def allow(self, slots: Tensor, masks: Tensor) -> None:
        """Says which tokens slots may draw next.

        Args:
            slots: (n,) int64 on the host, slots whose requests ask for structured output.
            masks: (n, words) int32 on the host, a bit per token for each of them, the lowest bit first.
        """
        if len(slots):
            assert self.masks is not None, "prepare the state for masks first"
            self.masks.index_copy_(0, self._send(slots), self._send(masks))

    def _send(self, x: Tensor) -> Tensor:
        """Copies a tensor to the device without waiting for it."""
        if self.device.type != "cuda":
            return x.to(self.device)
        return x.pin_memory().to(self.device, non_blocking=True)


def words_of(vocab: int) -> int:
    """Returns the words of 32 bits that a mask of the vocabulary has."""
    return -(-vocab // 32)
