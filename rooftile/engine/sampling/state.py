"""The sampler's state on the device: the parameters and token counts of the running sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput

# temperatures are clamped to these: within them 1 / T and T times the noise are finite, and beyond them no answer changes
COLDEST, HOTTEST = 1e-20, 1e20
# likewise for the repetition penalty and its product with a logit
MILDEST, HARSHEST = 1e-20, 1e20


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """The features of sampling that some row of a batch asks for; the batch computes no other. `|` gives the union of two."""

    chance: bool = False
    truncation: bool = False
    penalties: bool = False
    bias: bool = False
    mask: bool = False

    @property
    def changes_logits(self) -> bool:
        """Whether some row's logits are changed before the draw."""
        return self.penalties or self.bias or self.mask

    def __or__(self, other: SamplingFeatures) -> SamplingFeatures:
        return SamplingFeatures(
            self.chance or other.chance,
            self.truncation or other.truncation,
            self.penalties or other.penalties,
            self.bias or other.bias,
            self.mask or other.mask,
        )


def features_of(params: SamplingParams) -> SamplingFeatures:
    """Returns the features that one request asks for.

    Truncation never removes the most likely token, so a greedy request asks for none.
    """
    chance = params.temperature > 0
    return SamplingFeatures(
        chance=chance,
        truncation=chance and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        penalties=params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1,
        bias=bool(params.logit_bias) or params.allowed_token_ids is not None,
        mask=params.structured is not None,
    )


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

    def set(
        self,
        slots: list[int],
        params: list[SamplingParams],
        seeds: list[int],
        prompts: list[Sequence[int]],
        generated: list[Sequence[int]],
    ) -> None:
        """Assigns slots, each at most once, to requests; nothing of the slots' former requests remains.

        Args:
            slots, params, seeds, prompts: one of each per request.
            generated: the tokens that a preempted request has generated already; they are not in its prompt.
        """
        assert len(set(slots)) == len(slots) == len(params) == len(seeds) == len(prompts) == len(generated)
        if not slots:
            return
        wanted = [features_of(p) for p in params]
        for features in wanted:
            self.prepare(features)
        # the seed of a request's last answer, seed + n - 1, may exceed the largest int64
        bits = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
        whole = torch.tensor([slots, bits, [min(p.top_k, self.vocab) for p in params]], dtype=torch.int64)
        numbers = torch.tensor([_numbers(p) for p in params], dtype=torch.float64).T.contiguous()
        packed = self._send(torch.cat((whole, numbers.view(torch.int64))))  # (10, rows)
        where = packed[0]
        self.seed.index_copy_(0, where, packed[1])
        self.top_k.index_copy_(0, where, packed[2].int())
        self._numbers.index_copy_(1, where, packed[3:].view(torch.float64).float())
        for table in (self.counts, self.prompted, self.bias):
            if table is not None:
                table.index_fill_(0, where, 0)
        if self.masks is not None:
            self.masks.index_fill_(0, where, -1)
        self._count_tokens(
            [(slots[n], prompts[n]) for n, features in enumerate(wanted) if features.penalties],
            [(slots[n], generated[n]) for n, features in enumerate(wanted) if features.penalties],
        )
        self._write_biases([(slots[n], params[n]) for n, features in enumerate(wanted) if features.bias])

    def allow(self, slots: Sequence[int], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        """Says which tokens these slots may draw next.

        Args:
            slots: slots whose requests ask for structured output.
            masks: a bit per token for each of them, (words,), the lowest bit first.
        """
        if slots:
            assert self.masks is not None, "prepare the state for masks first"
            bits = self._send(torch.from_numpy(np.stack(masks)))  # (rows, words)
            self.masks.index_copy_(0, self._send(torch.tensor(slots)), bits)

    def _count_tokens(self, prompts: list[tuple[int, Sequence[int]]], generated: list[tuple[int, Sequence[int]]]) -> None:
        """Marks the tokens of prompts and counts generated tokens, in slots whose rows are empty."""
        if self.counts is None or self.prompted is None or not prompts:
            return
        slots, tokens = self._pairs(prompts)
        self.prompted.index_put_((slots, tokens), torch.ones((), dtype=torch.bool, device=self.device))
        slots, tokens = self._pairs(generated)
        self.counts.index_put_((slots, tokens), torch.ones_like(slots, dtype=torch.int32), accumulate=True)

    def _write_biases(self, requests: list[tuple[int, SamplingParams]]) -> None:
        """Writes the logit biases of requests, in slots whose rows are empty."""
        if self.bias is None or not requests:
            return
        allowed = [(slot, params.allowed_token_ids) for slot, params in requests if params.allowed_token_ids is not None]
        if allowed:
            self.bias.index_fill_(0, self._send(torch.tensor([slot for slot, _ in allowed])), -torch.inf)
            slots, tokens = self._pairs(allowed)
            self.bias.index_put_((slots, tokens), torch.zeros((), device=self.device))
        biases = [(slot, _biases(params)) for slot, params in requests]
        slots, tokens = self._pairs([(slot, list(each)) for slot, each in biases])
        values = torch.tensor([value for _, each in biases for value in each.values()], dtype=torch.float32)
        self.bias.index_put_((slots, tokens), self._send(values))

    def _pairs(self, rows: list[tuple[int, Sequence[int]]]) -> Tensor:
        """Returns slots and tokens side by side, (2, total), on the device."""
        tokens = torch.tensor([token for _, each in rows for token in each], dtype=torch.int64)
        # an index out of bounds would end the process on a GPU
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab:
            raise InvalidInput(f"token ids go from {tokens.min()} to {tokens.max()}; the model has 0 to {self.vocab - 1}")
        lengths = torch.tensor([len(each) for _, each in rows])
        slots = torch.tensor([slot for slot, _ in rows], dtype=torch.int64).repeat_interleave(lengths)
        return self._send(torch.stack((slots, tokens)))

    def _send(self, x: Tensor) -> Tensor:
        """Copies a tensor to the device without waiting for it."""
        if self.device.type != "cuda":
            return x.to(self.device)
        return x.pin_memory().to(self.device, non_blocking=True)


def words_of(vocab: int) -> int:
    """Returns the words of 32 bits that a mask of the vocabulary has."""
    return -(-vocab // 32)


def _biases(params: SamplingParams) -> Mapping[int, float]:
    """Returns the logit biases of the tokens that may be taken; the biases of others would bring them back."""
    biases, allowed = params.logit_bias or {}, params.allowed_token_ids
    return biases if allowed is None else {token: bias for token, bias in biases.items() if token in allowed}


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    """Returns a request's numbers in the order of the state's rows, each finite in fp32."""
    temperature = min(max(params.temperature, COLDEST), HOTTEST) if params.temperature > 0 else 0.0
    repetition = min(max(params.repetition_penalty, MILDEST), HARSHEST)
    penalties = (params.presence_penalty, params.frequency_penalty, repetition)
    return (temperature, params.top_p, params.min_p, *penalties, float(features_of(params).bias))
