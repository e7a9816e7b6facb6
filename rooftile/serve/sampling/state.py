"""What the sampler must know of the running sequences: what each asks for, and what it said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.serve.sampling.params import SamplingParams

# within these a temperature's reciprocal and its product with the noise are finite; no answer changes beyond them
COLDEST, HOTTEST = 1e-20, 1e20
# the same for the repetition penalty and a logit
MILDEST, HARSHEST = 1e-20, 1e20


@dataclass(frozen=True, slots=True)
class Wants:
    """What any row of a batch asks for, so that the batch pays for nothing else; `|` joins two."""

    chance: bool = False
    truncation: bool = False
    penalties: bool = False
    bias: bool = False

    def __or__(self, other: Wants) -> Wants:
        return Wants(
            self.chance or other.chance,
            self.truncation or other.truncation,
            self.penalties or other.penalties,
            self.bias or other.bias,
        )


def wants_of(params: SamplingParams) -> Wants:
    """What one request asks for. Truncation never removes the most likely token, so a greedy request asks for none."""
    chance = params.temperature > 0
    return Wants(
        chance=chance,
        truncation=chance and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        penalties=params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1,
        bias=bool(params.logit_bias),
    )


class SamplingState:
    """What the sampler must know of every running sequence, on the device, one row (a slot) each.

    Fresh slots are greedy. Tables as wide as the vocabulary are made when the first request asks for what they hold, and stay
    where they are: a captured graph may keep their addresses.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        self.slots, self.vocab, self.device = slots, vocab, torch.device(device)
        # (7, slots): one block, so that a request's numbers arrive in one copy
        self._numbers = torch.zeros(7, slots, device=device)
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition, self.biased = (
            self._numbers
        )
        self.top_p.fill_(1)
        self.repetition.fill_(1)
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        # (slots, vocab): how often a token was generated, whether it is in the prompt, and what is added to its logit
        self.counts: Tensor | None = None
        self.prompted: Tensor | None = None
        self.bias: Tensor | None = None

    def prepare(self, wants: Wants) -> None:
        """Makes the tables that such batches need, if they are not there yet; before a graph is captured, say."""
        shape = (self.slots, self.vocab)
        if wants.penalties and self.counts is None:
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.prompted = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if wants.bias and self.bias is None:
            self.bias = torch.zeros(shape, device=self.device)

    def set(
        self,
        slots: list[int],
        params: list[SamplingParams],
        seeds: list[int],
        prompts: list[Sequence[int]],
        generated: list[Sequence[int]],
    ) -> None:
        """Gives slots, each at most once, to requests; nothing of those that had them before remains.

        `generated` is what a request that was preempted has generated already, and is not in its prompt.
        """
        assert len(set(slots)) == len(slots) == len(params) == len(seeds) == len(prompts) == len(generated)
        if not slots:
            return
        wants = [wants_of(p) for p in params]
        for each in wants:
            self.prepare(each)
        # the seed of a request's last sample may be past the largest int64
        bits = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
        whole = torch.tensor([slots, bits, [min(p.top_k, self.vocab) for p in params]], dtype=torch.int64)
        numbers = torch.tensor([_numbers(p) for p in params], dtype=torch.float64).T.contiguous()
        packed = self._carry(torch.cat((whole, numbers.view(torch.int64))))  # (10, rows)
        where = packed[0]
        self.seed.index_copy_(0, where, packed[1])
        self.top_k.index_copy_(0, where, packed[2].int())
        self._numbers.index_copy_(1, where, packed[3:].view(torch.float64).float())
        for table in (self.counts, self.prompted, self.bias):
            if table is not None:
                table.index_fill_(0, where, 0)
        self._remember(
            [(slots[n], prompts[n]) for n, each in enumerate(wants) if each.penalties],
            [(slots[n], generated[n]) for n, each in enumerate(wants) if each.penalties],
        )
        self._lean([(slots[n], params[n]) for n, each in enumerate(wants) if each.bias])

    def _remember(self, prompts: list[tuple[int, Sequence[int]]], generated: list[tuple[int, Sequence[int]]]) -> None:
        """Marks prompts and counts what was generated, for slots whose rows are empty."""
        if self.counts is None or self.prompted is None or not prompts:
            return
        slots, tokens = self._pairs(prompts)
        self.prompted.index_put_((slots, tokens), torch.ones((), dtype=torch.bool, device=self.device))
        slots, tokens = self._pairs(generated)
        self.counts.index_put_((slots, tokens), torch.ones_like(slots, dtype=torch.int32), accumulate=True)

    def _lean(self, requests: list[tuple[int, SamplingParams]]) -> None:
        """Writes the biases of requests into rows that are empty."""
        if self.bias is None or not requests:
            return
        biases = [(slot, params.logit_bias or {}) for slot, params in requests]
        slots, tokens = self._pairs([(slot, list(each)) for slot, each in biases])
        values = torch.tensor([value for _, each in biases for value in each.values()], dtype=torch.float32)
        self.bias.index_put_((slots, tokens), self._carry(values))

    def _pairs(self, rows: list[tuple[int, Sequence[int]]]) -> Tensor:
        """Slots and tokens, (2, total), on the device."""
        tokens = torch.tensor([token for _, each in rows for token in each], dtype=torch.int64)
        # on a GPU an index out of bounds ends the process
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab:
            raise InvalidInput(
                f"token ids go from {tokens.min()} to {tokens.max()}; the model has 0 to {self.vocab - 1}"
            )
        lengths = torch.tensor([len(each) for _, each in rows])
        slots = torch.tensor([slot for slot, _ in rows], dtype=torch.int64).repeat_interleave(lengths)
        return self._carry(torch.stack((slots, tokens)))

    def _carry(self, x: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return x.to(self.device)
        return x.pin_memory().to(self.device, non_blocking=True)


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    """A request's numbers in the order of the state's rows, each finite in fp32."""
    temperature = min(max(params.temperature, COLDEST), HOTTEST) if params.temperature > 0 else 0.0
    repetition = min(max(params.repetition_penalty, MILDEST), HARSHEST)
    penalties = (params.presence_penalty, params.frequency_penalty, repetition)
    return (temperature, params.top_p, params.min_p, *penalties, float(bool(params.logit_bias)))
