"""`NewSlots`: the sampling parameters of requests that get a slot, in integers that the device and other ranks can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.sampling.features import SamplingFeatures, features_of
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput

# temperatures are clamped to these: within them 1 / T and T times the noise are finite, and beyond them no answer changes
COLDEST, HOTTEST = 1e-20, 1e20
# likewise for the repetition penalty and its product with a logit
MILDEST, HARSHEST = 1e-20, 1e20


class NewSlots(NamedTuple):
    """The n slots that begin with a request; all int64, with the bits of an fp64 number where there is a fraction."""

    numbers: Tensor
    """(11, n): slot, seed, top_k, features, and as fp64 the rows of `SamplingState`'s numbers."""
    prompted: Tensor
    """(2, k): slots and tokens of prompts, where penalties are asked for."""
    counted: Tensor
    """(2, k): slots and tokens that a preempted request has generated, likewise."""
    allowed: Tensor
    """(2, k): slots and the tokens that alone may be drawn there."""
    biases: Tensor
    """(3, k): slots, tokens, and as fp64 the biases of their logits."""

    @classmethod
    def of(
        cls, slots: Sequence[int], params: Sequence[SamplingParams], seeds: Sequence[int], prompts: Sequence[Sequence[int]],
        generated: Sequence[Sequence[int]], *, vocab: int,
    ) -> NewSlots:  # fmt: skip
        """Assigns slots, each at most once, to requests.

        Args:
            slots, params, seeds, prompts: one of each per request.
            generated: the tokens that a preempted request has generated already; they are not in its prompt.
            vocab: the number of tokens.
        """
        assert len(set(slots)) == len(slots) == len(params) == len(seeds) == len(prompts) == len(generated)
        if not slots:
            return NONE
        wanted = [features_of(each) for each in params]
        # the seed of a request's last answer, seed + n - 1, may exceed the largest int64
        bits = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
        whole = torch.tensor([slots, bits, [min(p.top_k, vocab) for p in params], [features.bits for features in wanted]])
        penalised = [n for n, features in enumerate(wanted) if features.penalties]
        biased = [(slots[n], params[n]) for n, features in enumerate(wanted) if features.bias]
        values = [(slot, _biases(each)) for slot, each in biased]
        pairs = _pairs([(slot, list(each)) for slot, each in values], vocab)
        return cls(
            torch.cat((whole, _bits([_numbers(p) for p in params]).T)),
            _pairs([(slots[n], prompts[n]) for n in penalised], vocab),
            _pairs([(slots[n], generated[n]) for n in penalised], vocab),
            _pairs([(slot, each.allowed_token_ids) for slot, each in biased if each.allowed_token_ids is not None], vocab),
            torch.cat((pairs, _bits([value for _, each in values for value in each.values()])[None])),
        )

    @property
    def features(self) -> SamplingFeatures:
        """The union of what the requests ask for."""
        bits = 0
        for each in self.numbers[3].tolist():
            bits |= each
        return SamplingFeatures.of_bits(bits)


NONE = NewSlots(*(torch.empty(rows, 0, dtype=torch.int64) for rows in (11, 2, 2, 2, 3)))


def fractions(bits: Tensor) -> Tensor:
    """Returns the fp32 numbers whose fp64 bits these are."""
    return bits.view(torch.float64).float()


def _bits(numbers: Sequence[float] | Sequence[tuple[float, ...]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(torch.int64)


def _pairs(rows: Sequence[tuple[int, Sequence[int]]], vocab: int) -> Tensor:
    """Returns slots and tokens side by side, (2, total)."""
    tokens = torch.tensor([token for _, each in rows for token in each], dtype=torch.int64)
    # an index out of bounds would end the process on a GPU
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise InvalidInput(f"token ids go from {tokens.min()} to {tokens.max()}; the model has 0 to {vocab - 1}")
    slots = torch.tensor([slot for slot, each in rows for _ in each], dtype=torch.int64)
    return torch.stack((slots, tokens))


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
