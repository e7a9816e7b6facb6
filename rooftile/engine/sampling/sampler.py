"""The next token of every running sequence, drawn on the device that the logits are on.

A row's logits become scores in this order: repetition penalty, frequency and presence penalties, bias, mask (together x), then
top-k, top-p and min-p, which look at softmax(x / temperature). The draw is the Gumbel-max trick, scaled by the temperature T:

    token = argmax_i (x_i + T g_i)    g = -log(-log u)    u uniform in (0, 1)

which is a draw from softmax(x / T), and with T = 0 the most likely token, the first of equals. The noise comes from Philox
keyed by the request's seed, at the counter (token id // 4, position, 0) and the word token id % 4: a request's tokens depend on
its seed, its logits and its positions, never on its slot, the batch or its neighbours.

NaN counts as -inf, and +inf as the largest finite number. A token of -inf is never drawn: a row with a NaN in it is drawn from
its other tokens, and a row in which every token is -inf gets NOTHING instead of a token. This mark travels with the tokens, so
the host learns of such a row when they arrive, without a wait of its own.

This file is the definition, in torch on any device. On CUDA `sample` runs `sampling_kernels` instead. Neither waits for the
device, and no shape depends on data, so both can be captured into a CUDA graph, one for each `SamplingFeatures`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.engine.sampling.features import SamplingFeatures, features_of
from rooftile.engine.sampling.state import SamplingState
from rooftile.exact.reference import philox
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.operators import define, watched

__all__ = ["NOTHING", "SamplingFeatures", "SamplingState", "features_of", "logprobs", "sample"]

# in place of a token, where none may be drawn
NOTHING = -1
LARGEST = torch.finfo(torch.float32).max
# logprobs makes at most this many logits fp32 at once: a long prompt times a large vocabulary does not fit into memory
MOST_NUMBERS = 1 << 26


def sample(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: SamplingFeatures) -> Tensor:
    """Chooses a token for each row, and writes it to the state as its slot's last; with penalties it also counts the token.

    Args:
        logits: (n, V), fp32 or bf16; they are not written.
        slots: (n,) int64, each row's slot in the state.
        positions: (n,) int64, the positions of the new tokens in their sequences.
        features: the union of what the rows ask for; a feature that is off is off for every row.

    Returns:
        The tokens, (n,) int64; NOTHING where none may be drawn, and the slot's last token is then 0.
    """
    assert logits.shape == (len(slots), state.vocab)
    assert positions.shape == slots.shape
    assert not features.penalties or state.counts is not None, "prepare the state for penalties first"
    assert not features.bias or state.bias is not None, "prepare the state for biases first"
    assert not features.mask or state.masks is not None, "prepare the state for masks first"
    if not torch.compiler.is_compiling() and not watched(logits, slots, positions):
        return _choose(logits, slots, positions, state, features)
    flags = features.chance, features.truncation, features.penalties, features.bias, features.mask
    with torch.no_grad():
        found: Tensor = _SAMPLE(logits, slots, positions, *state.tensors, *flags)
    return found


def _choose(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: SamplingFeatures) -> Tensor:
    if runs_kernels(logits):
        from rooftile.engine.sampling.sampling_kernels import sample as launch

        return launch(logits, slots, positions, state, features)
    return sample_as_defined(logits, slots, positions, state, features)


def _sample(logits: Tensor, slots: Tensor, positions: Tensor, *others: Any) -> Tensor:
    state = SamplingState.of_tensors(logits.shape[1], *others[:-5])
    return _choose(logits, slots, positions, state, SamplingFeatures(*others[-5:]))


_SAMPLE = define(
    "sample(Tensor logits, Tensor slots, Tensor positions, Tensor numbers, Tensor top_k, Tensor seed, Tensor(a!) last, "
    "Tensor(b!)? counts, Tensor? prompted, Tensor? bias, Tensor? masks, bool chance, bool truncation, bool penalties, "
    "bool biases, bool masked) -> Tensor",
    _sample,
    lambda logits, *others: logits.new_empty(logits.shape[0], dtype=torch.int64),
)


def sample_as_defined(
    logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: SamplingFeatures
) -> Tensor:
    """Does what `sample` does, in torch on any device."""
    x = penalised(logits, slots, state, features)
    if features.truncation:
        x = x.masked_fill(x < thresholds(x, slots, state), -torch.inf)
    if features.chance:
        x = x + state.temperature[slots][:, None] * gumbel(state.seed[slots], positions, state.vocab)
    best = x.argmax(1)
    drawn = x.gather(1, best[:, None])[:, 0] > -torch.inf
    # the best of nothing is the first token, which the model has: the next step may read it before the host has heard
    state.last.index_copy_(0, slots, best)
    if features.penalties and state.counts is not None:
        state.counts.index_put_((slots, best), drawn.int(), accumulate=True)
    return torch.where(drawn, best, NOTHING)


def penalised(logits: Tensor, slots: Tensor, state: SamplingState, features: SamplingFeatures) -> Tensor:
    """Returns fp32 logits (n, V) after penalties, bias and mask; each is a finite number or -inf."""
    x = logits.float()
    if features.penalties and state.counts is not None and state.prompted is not None:
        counts = state.counts[slots]
        repetition = state.repetition[slots][:, None]
        seen = state.prompted[slots] | (counts > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - state.frequency[slots][:, None] * counts
        x = x - state.presence[slots][:, None] * (counts > 0)
    if features.bias and state.bias is not None:
        x = x + state.bias[slots]
    if features.mask and state.masks is not None:
        bits = torch.arange(32, dtype=torch.int32, device=x.device)
        allowed = (state.masks[slots][:, :, None] >> bits & 1).flatten(1)[:, : state.vocab]
        x = x.masked_fill(allowed == 0, -torch.inf)
    return torch.where(x.isnan(), -torch.inf, x).clamp(max=LARGEST)


def thresholds(x: Tensor, slots: Tensor, state: SamplingState) -> Tensor:
    """Returns the smallest x that may be drawn from each row, (n, 1); `x` is what `penalised` returned.

    Top-k keeps the k most likely tokens and all that tie with the k-th. Among these top-p keeps the smallest set of the most
    likely tokens whose probability is at least top_p of theirs together, at least one token, and all that tie with the last.
    Min-p keeps the tokens whose probability is at least min_p times the most likely token's.
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
    """Returns Gumbel noise, (n, V) fp32, between -2.9 and 22.9.

    32 random bits b give w = min((b + 1/2) / 2^32, 1 - 2^-24) in fp32, which lies in (0, 1), and u = 1 - w. Large noise comes
    from w near 0, where fp32 is finest, so the tail from which unlikely tokens are drawn is resolved; -log(1 - w) is computed
    as a series there.
    """
    w = uniform(seeds, positions, vocab)
    small = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4))))
    return -torch.where(w < 1 / 64, small, -(1 - w).log()).log()


def uniform(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Returns uniform numbers in (0, 1), (n, V) fp32, with the same bits on every device."""
    quads = torch.arange(-(-vocab // 4), device=seeds.device)
    p = positions[:, None]
    four = philox.words(seeds[:, None], quads, p & 0xFFFFFFFF, (p >> 32) & 0xFFFFFFFF, torch.zeros_like(p))
    bits = torch.stack(four, 2).flatten(1)[:, :vocab]
    return ((bits.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)


def logprobs(logits: Tensor, tokens: Tensor, k: int, *, ordered: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes logprobs, log_softmax(logits) in fp32, before penalties and temperature.

    NaN counts as -inf, and +inf as the largest finite number, like in `sample`.

    Args:
        logits: (n, V).
        tokens: (n,) int64, the token chosen in each row.
        k: how many of the most likely tokens to return; all of them if V is smaller.
        ordered: whether the lower id comes first among tokens that tie, at the price of a sort.

    Returns:
        The tokens' logprobs (n,); ids and logprobs of the k most likely tokens, (n, k) each; and the tokens' ranks (n,), the
        number of more likely tokens plus 1. Tokens that tie share a rank; unless `ordered`, their order
        among the k is not defined.
    """
    n, V = logits.shape
    parts = []
    rows = max(1, MOST_NUMBERS // V)
    for first in range(0, max(n, 1), rows):
        ids = tokens[first : first + rows, None]
        x = logits[first : first + rows].float().nan_to_num(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)
        ranked = x.sort(dim=1, descending=True, stable=True) if ordered else x.topk(min(k, V), dim=1)
        best = ranked.indices[:, :k]
        # a row that is -inf throughout has no softmax
        scores = x.log_softmax(1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        parts.append((scores.gather(1, ids)[:, 0], best, scores.gather(1, best), (x > x.gather(1, ids)).sum(1) + 1))
    chosen, best, top, ranks = (torch.cat(each) for each in zip(*parts, strict=True))
    return chosen, best, top, ranks
