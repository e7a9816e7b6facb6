"""Sums of a tensor over the GPUs of one machine: each writes its part into the memory of all others, and adds what they wrote.

A rank's buffer has two halves for each rank, used in turn, which that rank alone writes. Blocks of the same number on all ranks
work together and count their calls; a block that has seen a rank's write of call n knows that this rank has read everything of
call n - 1, since its kernels run one after the other. So it may overwrite the half of call n - 1 in call n + 1.

`_sum_words` writes each 32-bit word beside the number of the call, in one store of 64 bits: the reader waits until the number is
there, and nothing else is needed between the GPUs. It sends twice the bytes. `_sum_chunks` writes the words alone, and one number
for a block after them.

All ranks add the parts in fp32, in the order of the ranks, and round once: they get the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _low(words, dtype: tl.constexpr):
    """Returns the first number of each word in fp32: of two 16-bit ones, or the only one."""
    if dtype == tl.float32:
        return words.to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, dtype: tl.constexpr):
    """Returns the second 16-bit number of each word in fp32."""
    return (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _words(low, high, dtype: tl.constexpr):
    """Rounds sums and packs them into words."""
    if dtype == tl.float32:
        return low.to(tl.int32, bitcast=True)
    else:
        first = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        second = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        return first | (second << 16)


@triton.jit
def _buffer(Peers, rank, dtype: tl.constexpr):
    """Returns where the buffer of a rank begins."""
    return tl.multiple_of(tl.load(Peers + rank).to(tl.pointer_type(dtype), bitcast=True), 16)


@triton.jit
def sum_words(
    X, Peers, Counts, Stop, words, RANK: tl.constexpr, ROOM: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Sums a tensor over all ranks, in place.

    X: the tensor in 32-bit words, (words,).
    Peers: addresses of the ranks' buffers, (RANKS,), each of (RANKS, 2, ROOM) numbers of 64 bits.
    Counts: calls of each block so far.
    Stop: not 0 once the other ranks are given up.
    """
    block = tl.program_id(0)
    count = tl.load(Counts + block) + 1
    half = count & 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(X + at, mask=at < words, other=0)
    sent = (count.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for other in tl.static_range(RANKS):
        if other != RANK:
            there = _buffer(Peers, other, tl.int64)
            tl.store(there + (RANK * 2 + half) * ROOM + at, sent)
    here = _buffer(Peers, RANK, tl.int64)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        part = own
        if other != RANK:
            place = here + (other * 2 + half) * ROOM + at
            got = tl.load(place, volatile=True)
            lacking = tl.max(((got >> 32).to(tl.int32) != count).to(tl.int32), 0)
            while (lacking != 0) & (tl.load(Stop, volatile=True) == 0):
                got = tl.load(place, volatile=True)
                lacking = tl.max(((got >> 32).to(tl.int32) != count).to(tl.int32), 0)
            part = got.to(tl.int32)
        low += _low(part, dtype)
        if dtype != tl.float32:
            high += _high(part, dtype)
    tl.store(X + at, _words(low, high, dtype), mask=at < words)
    tl.store(Counts + block, count)


@triton.jit
def sum_chunks(
    X, Peers, Counts, Stop, words, RANK: tl.constexpr, ROOM: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Sums a tensor over all ranks, in place, as `sum_words` does.

    Peers: addresses of the ranks' buffers, (RANKS,), each of (RANKS, 2, ROOM) words and then (RANKS, 2, ROOM // BLOCK) numbers.
    """
    block = tl.program_id(0)
    count = tl.load(Counts + block) + 1
    half = count & 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    own = tl.load(X + at, mask=inside, other=0)
    for other in tl.static_range(RANKS):
        if other != RANK:
            there = _buffer(Peers, other, tl.int32)
            tl.store(there + (RANK * 2 + half) * ROOM + at, own, mask=inside)
    # all threads have written before one says so
    tl.debug_barrier()
    for other in tl.static_range(RANKS):
        if other != RANK:
            there = _buffer(Peers, other, tl.int32) + RANKS * 2 * ROOM
            tl.atomic_xchg(there + (RANK * 2 + half) * (ROOM // BLOCK) + block, count, sem="release", scope="sys")
    here = _buffer(Peers, RANK, tl.int32)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        part = own
        if other != RANK:
            said = here + RANKS * 2 * ROOM + (other * 2 + half) * (ROOM // BLOCK) + block
            seen = tl.atomic_add(said, 0, sem="acquire", scope="sys")
            while (seen != count) & (tl.load(Stop, volatile=True) == 0):
                seen = tl.atomic_add(said, 0, sem="acquire", scope="sys")
            tl.debug_barrier()
            part = tl.load(here + (other * 2 + half) * ROOM + at, mask=inside, other=0, volatile=True)
        low += _low(part, dtype)
        if dtype != tl.float32:
            high += _high(part, dtype)
    tl.store(X + at, _words(low, high, dtype), mask=inside)
    tl.store(Counts + block, count)
