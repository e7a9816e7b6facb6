"""The sampler's rules once more, written as loops over Python's numbers and not from rooftile, and batches to try them on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rooftile.engine.sampling.new_slots import NewSlots
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.sampler import NOTHING, SamplingFeatures, SamplingState, features_of

# one of each kind
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=3.5),
    "top_k": SamplingParams(top_k=7, temperature=0.7),
    "top_1": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.8),
    "cold_top_p": SamplingParams(top_p=0.95, temperature=0.4),
    "hot_top_p": SamplingParams(top_p=0.6, temperature=5.0),
    "min_p": SamplingParams(min_p=0.07, temperature=1.7),
    "all_three": SamplingParams(top_k=40, top_p=0.9, min_p=0.03, temperature=1.3),
    "penalties": SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.6),
    "rewards": SamplingParams(presence_penalty=-0.7, frequency_penalty=-0.4, repetition_penalty=0.6, temperature=0),
    "bias": SamplingParams(logit_bias={0: 4.0, 3: -100.0}),
    "masked": SamplingParams(top_p=0.8, presence_penalty=0.5, structured={"choice": ["a"]}),
    "everything": SamplingParams(
        top_k=30, top_p=0.9, min_p=0.02, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 2.0}
    ),
}  # fmt: skip


def penalised(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> list[float]:
    """Logits after penalties, bias and mask."""
    count, x = Counter(generated), list(logits)
    for token in range(len(x)):
        if token in count or token in prompt:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count[token]
        if token in count:
            x[token] -= params.presence_penalty
        x[token] += (params.logit_bias or {}).get(token, 0)
        if params.structured is not None and not is_allowed(token):
            x[token] = -math.inf
    return x


def is_allowed(token: int) -> bool:
    """Stands in for a grammar."""
    return token % 3 != 1 and token != 64


def mask_of(vocab: int) -> npt.NDArray[np.int32]:
    """Returns the bits of what `is_allowed`; those beyond the vocabulary are set."""
    bits = np.array([token >= vocab or is_allowed(token) for token in range(-(-vocab // 32) * 32)])
    return np.packbits(bits, bitorder="little").view(np.int32)


def distribution(x: Sequence[float], params: SamplingParams) -> list[float]:
    """The exact probability of each token, given its penalised logit."""
    if params.temperature == 0:
        return [float(token == x.index(max(x))) for token in range(len(x))]
    kept = set(range(len(x)))
    weight = [math.exp((value - max(x)) / params.temperature) for value in x]
    if 0 < params.top_k < len(x):
        least = sorted(x, reverse=True)[params.top_k - 1]
        kept = {token for token in kept if x[token] >= least}
    if params.top_p < 1:
        total, mass = math.fsum(weight[token] for token in kept), 0.0
        nucleus: list[int] = []
        for token in sorted(kept, key=lambda token: -x[token]):
            if nucleus and mass >= params.top_p * total and x[token] < x[nucleus[-1]]:
                break
            nucleus.append(token)
            mass += weight[token]
        kept = set(nucleus)
    kept = {token for token in kept if weight[token] >= params.min_p * max(weight)}
    total = math.fsum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(x))]


def joined(params: Sequence[SamplingParams]) -> SamplingFeatures:
    """Returns the sampling features of a batch of these parameters."""
    features = SamplingFeatures()
    for each in params:
        features = features | features_of(each)
    return features


def assign(state: SamplingState, *given: Any) -> None:
    """Gives slots to requests: slots, parameters, seeds, prompts, and what was generated already."""
    state.set(NewSlots.of(*given, vocab=state.vocab))


def allow(state: SamplingState, slots: list[int], mask: Any) -> None:
    """Gives one mask to some slots."""
    state.allow(torch.tensor(slots, dtype=torch.int64), torch.from_numpy(mask).repeat(len(slots), 1))


class Batch:
    """Requests in slots of a state, in any order, with what they said so far."""

    def __init__(self, params: Sequence[SamplingParams], vocab: int, device: str = "cpu", slots: list[int] | None = None) -> None:
        n = len(params)
        draw = torch.Generator().manual_seed(vocab)
        self.params, self.features = list(params), joined(params)
        self.prompts = [torch.randint(vocab, (20,), generator=draw).tolist() for _ in range(n)]
        self.generated = [torch.randint(vocab, (n_said,), generator=draw).tolist() * 2 for n_said in range(n)]
        self.slots = list(range(n)) if slots is None else slots
        self.seeds = [1000 + 2**40 * i for i in range(n)]
        self.state = SamplingState(max(self.slots) + 2, vocab, device)
        self.set()
        self.index = torch.tensor(self.slots, device=device)
        self.positions = torch.arange(n, device=device) * 7 + 40
        self.logits = (torch.randn(n, vocab, generator=draw) * 3).to(device)

    def set(self) -> None:
        """Writes the requests into the state, as if they had just arrived."""
        assign(self.state, self.slots, self.params, self.seeds, list(self.prompts), list(self.generated))
        masked = [slot for slot, each in zip(self.slots, self.params, strict=True) if each.structured is not None]
        allow(self.state, masked, mask_of(self.state.vocab))

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, slots and positions of some rows in this order."""
        return self.logits[rows], self.index[rows], self.positions[rows]


HOSTILE = {
    "nothing": [-math.inf] * 6,
    "only NaN": [math.nan] * 6,
    "some NaN": [1.0, math.nan, 9.0, -math.inf, math.nan, 2.0],
    "inf": [0.0, 1.0, math.inf, math.inf, 5.0, -1.0],
    "inf and NaN": [math.nan, 1.0, math.inf, -math.inf, 5.0, -1.0],
    "one": [-math.inf, -math.inf, -math.inf, -math.inf, -1e30, -math.inf],
    "huge": [3e38, -3e38, 3e38, 0.0, 1e-40, -1e-40],
    "equal": [0.0] * 6,
}
# tokens that each of these rows may give
MAY = {
    "nothing": {-1}, "only NaN": {-1}, "some NaN": {0, 2, 5}, "inf": {2, 3}, "inf and NaN": {2}, "one": {4}, "huge": {0, 2},
    "equal": set(range(6)),
}  # fmt: skip


def assert_nothing_is_drawn(sample: Callable[..., Tensor], kind: str, device: str) -> None:
    """Rows of -inf beside others: by their logits, by biases, by a list of allowed tokens, or by a grammar's mask."""
    vocab, free = 70, KINDS[kind]
    never = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(vocab), -math.inf))
    only = SamplingParams(temperature=1.0, top_k=2, allowed_token_ids=[5], logit_bias={5: -math.inf}, presence_penalty=1.0)
    batch = Batch([free, never, free, only, KINDS["masked"]], vocab, device)
    batch.logits[2] = -math.inf
    batch.logits[0, 3] = math.nan
    allow(batch.state, [4], np.zeros(-(-vocab // 32), dtype=np.int32))
    batch.state.last.fill_(-5)
    before = None if batch.state.counts is None else batch.state.counts.sum(1)
    tokens = sample(*batch.of([0, 1, 2, 3, 4]), batch.state, batch.features).tolist()
    assert tokens[1:] == [NOTHING] * 4
    assert 0 <= tokens[0] < vocab
    assert tokens[0] != 3
    assert batch.state.last[:5].tolist() == [tokens[0], 0, 0, 0, 0]
    if before is not None and batch.state.counts is not None:
        # a row that asks for no penalties is counted in vain
        assert (batch.state.counts.sum(1) - before)[:5].tolist() == [1, 0, 0, 0, 0]
