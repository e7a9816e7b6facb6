"""The next token of every running sequence, drawn on the device that the logits are on.

A row's logits become scores in this order: repetition penalty, frequency and presence penalties, bias (together x), then
top-k, top-p and min-p, which look at softmax(x / temperature). The draw is the Gumbel-max trick, scaled by the temperature T:

    token = argmax_i (x_i + T g_i)    g = -log(-log u)    u uniform in (0, 1)

which is a draw from softmax(x / T), and with T = 0 the most likely token, the first of equals. The noise comes from Philox
keyed by the request's seed, at the counter (token id // 4, position, 0) and the word token id % 4: a request's tokens depend on
its seed, its logits and its positions, never on its slot, the batch or its neighbours.

What is not a number counts as -inf, and +inf as the largest number. A token of -inf is never drawn as long as there is
another; if there is none, the token is 0. So a row with a NaN in it is drawn from the rest.

This file is the definition, in torch on any device. On CUDA, `sample` runs the kernels of `kernels.py` instead. Neither
waits for the device nor has a shape that depends on what it holds: it may be captured into a CUDA graph, one for each `Wants`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.fused import runs_on
from rooftile.reference import philox
from rooftile.serve.sampling.state import SamplingState, Wants, wants_of

__all__ = ["SamplingState", "Wants", "logprobs", "sample", "wants_of"]

LARGEST = torch.finfo(torch.float32).max
# of logits made fp32 at once by logprobs: a long prompt times a large vocabulary does not fit
MOST_NUMBERS = 1 << 26


def sample(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, wants: Wants) -> Tensor:
    """A token for each row, (n,) int64; with penalties they are counted in the state.

    Args:
        logits: (n, V), fp32 or bf16; not written.
        slots: (n,) int64, of each row in the state.
        positions: (n,) int64, where the new tokens will stand in their sequences.
        wants: of all rows together; what is not in it is not done for any row.
    """
    assert logits.shape == (len(slots), state.vocab)
    assert positions.shape == slots.shape
    assert not wants.penalties or state.counts is not None, "prepare the state for penalties first"
    assert not wants.bias or state.bias is not None, "prepare the state for biases first"
    if runs_on(logits):
        from rooftile.serve.sampling.kernels import sample as launch

        return launch(logits, slots, positions, state, wants)
    return sample_as_defined(logits, slots, positions, state, wants)


def sample_as_defined(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, wants: Wants) -> Tensor:
    """What `sample` does, in torch on any device."""
    x = penalised(logits, slots, state, wants)
    if wants.truncation:
        x = x.masked_fill(x < thresholds(x, slots, state), -torch.inf)
    if wants.chance:
        x = x + state.temperature[slots][:, None] * gumbel(state.seed[slots], positions, state.vocab)
    tokens = x.argmax(1)
    if wants.penalties and state.counts is not None:
        state.counts.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
    return tokens


def penalised(logits: Tensor, slots: Tensor, state: SamplingState, wants: Wants) -> Tensor:
    """Logits in fp32 after penalties and bias: numbers and -inf, nothing else, (n, V)."""
    x = logits.float()
    if wants.penalties and state.counts is not None and state.prompted is not None:
        counts = state.counts[slots]
        repetition = state.repetition[slots][:, None]
        seen = state.prompted[slots] | (counts > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - state.frequency[slots][:, None] * counts
        x = x - state.presence[slots][:, None] * (counts > 0)
    if wants.bias and state.bias is not None:
        x = x + state.bias[slots]
    return torch.where(x.isnan(), -torch.inf, x).clamp(max=LARGEST)


def thresholds(x: Tensor, slots: Tensor, state: SamplingState) -> Tensor:
    """The least x that may be drawn, (n, 1); x as `penalised` returns it.

    Top-k keeps the k most likely tokens, and each that is equal to the k-th. Of these top-p keeps the fewest of the most likely
    that together have at least this share of their probability, at least one, and each that is equal to the last of them.
    Min-p keeps what is at least this share as likely as the most likely token.
    """
    V = x.shape[1]
    temperature, top_p, min_p = (each[slots][:, None] for each in (state.temperature, state.top_p, state.min_p))
    top_k = state.top_k[slots][:, None].long()
    ranked = x.sort(descending=True).values
    top = ranked[:, :1]
    least = ranked.gather(1, torch.where(top_k > 0, top_k, V).clamp(max=V) - 1)
    pivot = torch.where(top == -torch.inf, 0.0, top)
    weights = ((ranked.double() - pivot) / torch.where(temperature > 0, temperature, 1.0)).exp()
    weights = torch.where(ranked >= least, weights, 0.0)
    reached = weights.cumsum(1)
    held = (reached - weights < top_p * reached[:, -1:]).sum(1, keepdim=True).clamp(min=1)
    nucleus = torch.where(top_p < 1, ranked.gather(1, held - 1), -torch.inf)
    likely = top + temperature * min_p.log()
    found = torch.maximum(torch.maximum(least, nucleus), likely)
    return torch.where(temperature > 0, found, -torch.inf)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Noise, (n, V) fp32, from -2.9 to 22.9.

    Of 32 random bits b, w = min((b + 1/2) / 2^32, 1 - 2^-24) in fp32 lies in (0, 1), and u = 1 - w. It is w that is near 0
    where the noise is large, so that fp32 resolves the tail from which unlikely tokens are drawn; -log(1 - w) is a series there.
    """
    w = uniform(seeds, positions, vocab)
    small = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4))))
    return -torch.where(w < 1 / 64, small, -(1 - w).log()).log()


def uniform(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Numbers in (0, 1), (n, V) fp32, the same bits on every device."""
    quads = torch.arange(-(-vocab // 4), device=seeds.device)
    p = positions[:, None]
    four = philox.words(seeds[:, None], quads, p & 0xFFFFFFFF, (p >> 32) & 0xFFFFFFFF, torch.zeros_like(p))
    bits = torch.stack(four, 2).flatten(1)[:, :vocab]
    return ((bits.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of log_softmax(logits) in fp32, before penalties and temperature: what tokens got, the k best, and the tokens' ranks.

    Returns the tokens' logprobs (n,), ids and logprobs of the k most likely ones, both (n, k), and ranks (n,): how many tokens
    are more likely, plus 1. Equal tokens share a rank, and stand among the k in any order. Of a vocabulary below k there are all.
    """
    n, V = logits.shape
    parts = []
    rows = max(1, MOST_NUMBERS // V)
    for first in range(0, max(n, 1), rows):
        x, ids = logits[first : first + rows].float(), tokens[first : first + rows, None]
        best = x.topk(min(k, V), dim=1).indices
        scores = x.log_softmax(1)
        parts.append((scores.gather(1, ids)[:, 0], best, scores.gather(1, best), (x > x.gather(1, ids)).sum(1) + 1))
    chosen, best, top, ranks = (torch.cat(each) for each in zip(*parts, strict=True))
    return chosen, best, top, ranks
