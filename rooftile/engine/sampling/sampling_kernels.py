"""The sampler's Triton kernels: they compute what `sampler` defines, with no sort, no softmax and no wait.

`_draw` reads each segment of a row's logits once, applies penalties, bias and temperature times noise, and finds the segment's
best token; `_join` takes the best of a row's segments, or NOTHING where all are -inf. A maximum is exact and ties go to the lowest id, so the result depends
neither on how a row is cut into segments nor on the rest of the batch.

Only rows that ask for truncation get a threshold first. It is found by bisection on keys, integers that order like the fp32
numbers they stand for. Each pass tries three keys and counts the tokens (top-k) or sums the mass (top-p) at or above them; the
search ends when one token is left between a key with enough and a key with too little. Two steps make the passes short:

    `_survey` finds the maximum of each GROUP tokens. The k-th largest of these maxima is a lower bound of the k-th largest logit.
    `_bound`  copies the tokens above a lower bound out of the row, if they are at most ROOM, and the search goes on in the copy.

Top-k is exact. Sums of exponentials are fp32, always in the same order, so top-p may differ from the definition where the mass
equals top_p to within rounding. Penalised logits have the definition's bits, since no product is fused with a sum.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.sampling.noise import gumbel
from rooftile.engine.sampling.state import SamplingState
from rooftile.runtime.launch import Kernel

# tokens per program of _draw and _survey
SEGMENT = tl.constexpr(2048)
# tokens that are represented by their maximum in a top-k search
GROUP = tl.constexpr(64)
# tokens that a search reads per iteration
BLOCK = tl.constexpr(2048)
# the most tokens in the copy of a row
ROOM = tl.constexpr(4096)
# loads in flight while one block is processed
STAGES = tl.constexpr(4)
LARGEST = tl.constexpr(3.4028234663852886e38)
NOTHING = tl.constexpr(-1)
# the key of -inf
LOWEST = tl.constexpr(-2139095041)
THRESHOLD_WARPS = 16
# fusing a product with a sum would round once where the definition rounds twice
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_PLAIN, _CHANGED = {"CHANGED": False} | _OPTIONS, {"CHANGED": True} | _OPTIONS
_THRESHOLDS = _OPTIONS | {"num_warps": THRESHOLD_WARPS}


@triton.jit
def _tamed(x):
    """Replaces NaN by -inf, and +inf by the largest finite number."""
    return tl.minimum(tl.where(x == x, x, float("-inf")), LARGEST)


@triton.jit
def _key(x):
    """Returns the key of a number: an integer, such that keys order like their numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(key):
    """Returns the number that has this key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# fmt: off
@triton.jit
def _penalised(
    logits_row, slot, token, V, counts_ptr, prompted_ptr, bias_ptr, masks_ptr, presence_ptr, frequency_ptr, repetition_ptr,
    biased_ptr, penalties, bias, mask, CHANGED: tl.constexpr,
):
    # fmt: on
    """Returns logits after penalties, bias and mask, -inf beyond the vocabulary. Rows that ask for none read no table.

    The three are told at run time: each set of them would be a kernel to compile, while requests wait. CHANGED: there is one.
    """
    there = token < V
    x = tl.load(logits_row + token, mask=there, other=float("-inf")).to(tl.float32)
    line = slot * V + token
    # a row's parameters are widened to its tokens before they are compared: the interpreter gets a scalar's type wrong afterwards
    zero = tl.zeros_like(x)
    if CHANGED:
        if penalties:
            presence = tl.load(presence_ptr + slot)
            frequency = tl.load(frequency_ptr + slot)
            repetition = tl.load(repetition_ptr + slot)
            is_penalised = there & (zero + tl.abs(presence) + tl.abs(frequency) + tl.abs(repetition - 1.0) > 0.0)
            count = tl.load(counts_ptr + line, mask=is_penalised, other=0)
            seen = (tl.load(prompted_ptr + line, mask=is_penalised, other=0) != 0) | (count > 0)
            divided = tl.div_rn(x, zero + repetition)
            x = tl.where(seen, tl.where(x > 0, divided, x * repetition), x)
            x = x - frequency * count.to(tl.float32)
            x = x - presence * (count > 0).to(tl.float32)
        if bias:
            is_biased = there & (zero + tl.load(biased_ptr + slot) > 0.0)
            x = x + tl.load(bias_ptr + line, mask=is_biased, other=0.0)
        if mask:
            # a row without a grammar has all bits set
            word = tl.load(masks_ptr + slot * ((V + 31) // 32) + token // 32, mask=there, other=0)
            x = tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))
    return _tamed(x)


# fmt: off
@triton.jit(
    do_not_specialize=["segments", "penalties", "bias", "mask", "chance", "truncation"],
    do_not_specialize_on_alignment=[
        "slots_ptr", "positions_ptr", "thresholds_ptr", "temperature_ptr", "seed_ptr", "presence_ptr", "frequency_ptr",
        "repetition_ptr", "biased_ptr",
    ],
)
def _draw(
    logits_ptr, slots_ptr, positions_ptr, thresholds_ptr, best_ptr, token_ptr, temperature_ptr, seed_ptr,
    counts_ptr, prompted_ptr, bias_ptr, masks_ptr, presence_ptr, frequency_ptr, repetition_ptr, biased_ptr, logits_stride, V,
    segments, penalties, bias, mask, chance, truncation, CHANGED: tl.constexpr,
):
    """Writes the best score of a segment, and the first token that has it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    first = tl.program_id(1) * SEGMENT
    token = first + tl.arange(0, SEGMENT)
    x = _penalised(
        logits_ptr + row * logits_stride, slot, token, V, counts_ptr, prompted_ptr, bias_ptr, masks_ptr, presence_ptr,
        frequency_ptr, repetition_ptr, biased_ptr, penalties, bias, mask, CHANGED)
    # fmt: on
    if truncation:
        x = tl.where(x >= tl.load(thresholds_ptr + row), x, float("-inf"))
    if chance:
        temperature = tl.load(temperature_ptr + slot)
        # most segments of a truncated row have no token left
        if (temperature > 0.0) & (tl.max(x, 0) > float("-inf")):
            x = x + temperature * gumbel(tl.load(seed_ptr + slot), tl.load(positions_ptr + row), first, SEGMENT)
    best = tl.max(x, 0)
    place = row * segments + tl.program_id(1)
    tl.store(best_ptr + place, best)
    tl.store(token_ptr + place, tl.min(tl.where(x == best, token, V), 0))


@triton.jit(do_not_specialize=["segments", "V", "penalties"], do_not_specialize_on_alignment=["slots_ptr", "last_ptr"])
def _join(
    best_ptr, token_ptr, slots_ptr, out_ptr, last_ptr, counts_ptr, V, segments, penalties, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Writes the best token of a row's segments, also as its slot's last; with penalties it also counts the token."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SEGMENTS)
    best = tl.load(best_ptr + row * segments + s, mask=s < segments, other=float("-inf"))
    token = tl.load(token_ptr + row * segments + s, mask=s < segments, other=2147483647)
    top = tl.max(best, 0)
    # in a row of -inf the best is token 0, which the next step may read before the host has heard
    drawn = top > float("-inf")
    token = tl.min(tl.where(best == top, token, 2147483647), 0).to(tl.int64)
    tl.store(out_ptr + row, tl.where(drawn, token, NOTHING))
    # rows that pad a batch share a slot
    slot = tl.load(slots_ptr + row)
    tl.store(last_ptr + slot, token)
    if penalties:
        tl.atomic_add(counts_ptr + slot * V + token, drawn.to(tl.int32))


@triton.jit
def _is_truncated(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V):
    """Tells whether a row is truncated; a greedy row never is."""
    k = tl.load(top_k_ptr + slot)
    some = ((k > 0) & (k < V)) | (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
    return some & (tl.load(temperature_ptr + slot) > 0.0)


# fmt: off
@triton.jit(
    do_not_specialize=["segments", "penalties", "bias", "mask"],
    do_not_specialize_on_alignment=[
        "slots_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "presence_ptr", "frequency_ptr", "repetition_ptr", "biased_ptr",
    ],
)
def _survey(
    logits_ptr, slots_ptr, x_ptr, tops_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    counts_ptr, prompted_ptr, bias_ptr, masks_ptr, presence_ptr, frequency_ptr, repetition_ptr, biased_ptr, logits_stride, V,
    segments, penalties, bias, mask, CHANGED: tl.constexpr,
):
    """Writes the maximum of each group of a segment; with penalties, bias or a mask also the scores, for the search."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if not _is_truncated(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V):
        return
    token = tl.program_id(1) * SEGMENT + tl.arange(0, SEGMENT)
    x = _penalised(
        logits_ptr + row * logits_stride, slot, token, V, counts_ptr, prompted_ptr, bias_ptr, masks_ptr, presence_ptr,
        frequency_ptr, repetition_ptr, biased_ptr, penalties, bias, mask, CHANGED)
    # fmt: on
    if CHANGED:
        tl.store(x_ptr + row * V + token, x, mask=token < V)
    groups = tl.arange(0, SEGMENT // GROUP)
    tops = tl.max(tl.reshape(x, (SEGMENT // GROUP, GROUP)), 1)
    tl.store(tops_ptr + (row * segments + tl.program_id(1)) * (SEGMENT // GROUP) + groups, tops)


@triton.jit
def _mass(x_ptr, length, least, top, rate):
    """Returns the sum of exp((x - top) rate) over all x >= least."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK)
        x = _tamed(tl.load(x_ptr + i, mask=i < length, other=float("-inf")).to(tl.float32))
        total += tl.where(x >= least, tl.exp((x - top) * rate), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _bound(x_ptr, length, least, copy_ptr):
    """Counts the x >= least and copies them in their order, as many as fit; returns the count."""
    found = tl.cast(0, tl.int32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < length, other=float("-inf"))
        takes = ((_tamed(x.to(tl.float32)) >= least) & (i < length)).to(tl.int32)
        place = found + tl.cumsum(takes, 0) - 1
        tl.store(copy_ptr + place, x, mask=(takes > 0) & (place < ROOM))
        found += tl.sum(takes, 0)
    # the barrier: other threads of this program read the copy next
    tl.debug_barrier()
    return found


# fmt: off
@triton.jit
def _search(x_ptr, length, copy_ptr, low, n_low, high, enough, top, rate, MASS: tl.constexpr, COPY: tl.constexpr):
    # fmt: on
    """Finds the largest key with enough at or above it: `enough` is a number of tokens, or with MASS a mass.

    There is enough at and above `low`, which are n_low tokens, and nothing at and above `high`. Returns the key, its number of
    tokens, and the row or copy with its length in which a further search goes on. With a single token left between low and high
    the search stops: low then keeps the same tokens as the key.
    """
    n_high = tl.cast(0, tl.int32)
    while (high - low > 1) & (n_low - n_high > 1):
        step = (high - low + 3) // 4
        b_key = tl.minimum(low + 2 * step, high - 1)
        c_key = tl.minimum(low + 3 * step, high - 1)
        a_key = low + step
        a, b, c = _number(a_key), _number(b_key), _number(c_key)
        n_a = tl.zeros((BLOCK,), tl.int32)
        n_b = tl.zeros((BLOCK,), tl.int32)
        n_c = tl.zeros((BLOCK,), tl.int32)
        m_a = tl.zeros((BLOCK,), tl.float32)
        m_b = tl.zeros((BLOCK,), tl.float32)
        m_c = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, length, BLOCK, num_stages=STAGES):
            i = start + tl.arange(0, BLOCK)
            x = _tamed(tl.load(x_ptr + i, mask=i < length, other=float("-inf")).to(tl.float32))
            n_a += (x >= a).to(tl.int32)
            n_b += (x >= b).to(tl.int32)
            n_c += (x >= c).to(tl.int32)
            if MASS:
                p = tl.exp((x - top) * rate)
                m_a += tl.where(x >= a, p, 0.0)
                m_b += tl.where(x >= b, p, 0.0)
                m_c += tl.where(x >= c, p, 0.0)
        at_a, at_b, at_c = tl.sum(n_a, 0), tl.sum(n_b, 0), tl.sum(n_c, 0)
        if MASS:
            a_is = tl.sum(m_a, 0) >= enough
            b_is = tl.sum(m_b, 0) >= enough
            c_is = tl.sum(m_c, 0) >= enough
        else:
            a_is, b_is, c_is = at_a >= enough, at_b >= enough, at_c >= enough
        # high: the lowest key with too little; low: the highest key with enough
        high = tl.where(c_is, high, tl.where(b_is, c_key, tl.where(a_is, b_key, a_key)))
        n_high = tl.where(c_is, n_high, tl.where(b_is, at_c, tl.where(a_is, at_b, at_a)))
        low = tl.where(c_is, c_key, tl.where(b_is, b_key, tl.where(a_is, a_key, low)))
        n_low = tl.where(c_is, at_c, tl.where(b_is, at_b, tl.where(a_is, at_a, n_low)))
        if COPY:
            if (length > ROOM) & (n_low <= ROOM):
                length = _bound(x_ptr, length, _number(low), copy_ptr)
                x_ptr = copy_ptr
    return low, n_low, x_ptr, length


# V = 1 must not become a constant: `length` starts as V and changes in the loop
@triton.jit(
    do_not_specialize=["groups", "V"],
    do_not_specialize_on_alignment=["slots_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"],
)
def _threshold(
    x_ptr, copy_ptr, slots_ptr, tops_ptr, out_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, x_stride, V, groups,
):  # fmt: skip
    """Writes the smallest score of a row that may be drawn."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if not _is_truncated(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V):
        tl.store(out_ptr + row, float("-inf"))
        return
    temperature = tl.load(temperature_ptr + slot)
    k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    x_ptr += row * x_stride
    copy_ptr += row * ROOM
    tops_ptr += row * groups
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, groups, BLOCK):
        i = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(tops_ptr + i, mask=i < groups, other=float("-inf")))
    top = tl.max(best, 0)
    if top == float("-inf"):
        tl.store(out_ptr + row, top)
        return

    rate = 1.0 / temperature
    length = V
    low = tl.cast(LOWEST, tl.int64)
    n_low = V
    high = _key(top) + 1
    if (k > 0) & (k < V):
        if k <= groups:
            low, _, _, _ = _search(tops_ptr, groups, tops_ptr, low, groups, high, k, top, rate, False, False)
            n_low = _bound(x_ptr, V, _number(low), copy_ptr)
            if n_low <= ROOM:
                x_ptr = copy_ptr
                length = n_low
        low, n_low, x_ptr, length = _search(x_ptr, length, copy_ptr, low, n_low, high, k, top, rate, False, True)
    if top_p < 1.0:
        total = _mass(x_ptr, length, _number(low), top, rate)
        # all tokens below this hold together at most half of the mass that top-p may drop
        spare = top + temperature * tl.log((1 - top_p) * 0.5 * total / V)
        if (length > ROOM) & (_key(spare) > low):
            low = _key(spare)
            n_low = _bound(x_ptr, length, spare, copy_ptr)
            if n_low <= ROOM:
                x_ptr = copy_ptr
                length = n_low
        low, _, _, _ = _search(x_ptr, length, copy_ptr, low, n_low, high, top_p * total, top, rate, True, True)
    likely = top + temperature * tl.log(tl.load(min_p_ptr + slot))
    tl.store(out_ptr + row, tl.maximum(_number(low), likely))


def _tables(state: SamplingState, features: SamplingFeatures) -> tuple[Tensor, ...]:
    """Returns the state's tables in the kernels' order; one of the same dtype stands in for a table that is not read."""
    counts, prompted, bias, masks = state.top_k, state.top_k.view(torch.uint8), state.temperature, state.top_k
    if features.penalties:
        counts, prompted = state.counts, state.prompted.view(torch.uint8)
    if features.bias:
        bias = state.bias
    if features.mask:
        masks = state.masks
    return (counts, prompted, bias, masks, state.presence, state.frequency, state.repetition, state.biased)


_start_survey, _start_threshold, _start_draw, _start_join = Kernel(_survey), Kernel(_threshold), Kernel(_draw), Kernel(_join)


def thresholds(logits: Tensor, slots: Tensor, state: SamplingState, features: SamplingFeatures) -> Tensor:
    """Returns the smallest score that may be drawn from each row, (n,) fp32; -inf for rows without truncation."""
    n, V = logits.shape
    segments = triton.cdiv(V, SEGMENT.value)
    groups = segments * (SEGMENT.value // GROUP.value)
    x = torch.empty((n, V), dtype=torch.float32, device=logits.device) if features.changes_logits else logits
    copy = torch.empty((n, ROOM.value), dtype=x.dtype, device=logits.device)
    tops, out = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in ((n, groups), (n,)))
    asked = (state.temperature, state.top_k, state.top_p, state.min_p)
    arguments = (logits, slots, x, tops, *asked, *_tables(state, features), logits.stride(0), V, segments, *_changes(features))
    _start_survey((n, segments, 1), arguments, _CHANGED if features.changes_logits else _PLAIN)
    _start_threshold((n, 1, 1), (x, copy, slots, tops, out, *asked, x.stride(0), V, groups), _THRESHOLDS)
    return out


def sample(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: SamplingFeatures) -> Tensor:
    """Does what `sampler.sample` says."""
    n, V = logits.shape
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if not n:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    slots, positions = slots.contiguous(), positions.contiguous()
    segments = triton.cdiv(V, SEGMENT.value)
    least = thresholds(logits, slots, state, features) if features.truncation else state.temperature
    best = torch.empty((n, segments), dtype=torch.float32, device=logits.device)
    token = torch.empty((n, segments), dtype=torch.int32, device=logits.device)
    tables = _tables(state, features)
    arguments = (
        logits, slots, positions, least, best, token, state.temperature, state.seed, *tables, logits.stride(0), V, segments,
        *_changes(features), int(features.chance), int(features.truncation),
    )  # fmt: skip
    _start_draw((n, segments, 1), arguments, _CHANGED if features.changes_logits else _PLAIN)
    arguments = (best, token, slots, out, state.last, tables[0], V, segments, int(features.penalties))
    _start_join((n, 1, 1), arguments, _joins(segments))
    return out


def _changes(features: SamplingFeatures) -> tuple[int, int, int]:
    """Returns which tables the kernels read: penalties, biases and masks."""
    return int(features.penalties), int(features.bias), int(features.mask)


@cache
def _joins(segments: int) -> dict[str, Any]:
    return {"SEGMENTS": triton.next_power_of_2(segments)} | _OPTIONS
