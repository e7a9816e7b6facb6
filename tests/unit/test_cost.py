"""The cost model, compared with programs that loop over the tiles and count every element."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rooftile import CAUSAL, FULL, Chunk, InvalidInput, Mask, Prefix, Window
from rooftile.cost import flops, io, roof
from rooftile.exact import reference
from rooftile.exact.cases import CASES
from rooftile.exact.masks import materialise
from rooftile.exact.spec import Problem, Sizes, Spec
from rooftile.hardware.chips import Rates


def problem(
    T: int = 10, S: int = 10, B: int = 1, H: int = 2, Hk: int = 2, D: int = 3, Dv: int = 3, mask: Mask = FULL,
    dtype: torch.dtype = torch.bfloat16, lengths: tuple[tuple[int, int], ...] = (),
) -> Problem:  # fmt: skip
    spec = Spec(dtype=dtype, dim=D, dim_v=Dv, group=H // Hk, mask=mask, scale=1.0, layout="packed" if lengths else "dense")
    return Problem(spec=spec, sizes=Sizes(B=len(lengths) or B, T=T, S=S, H=H, Hk=Hk, lengths=lengths))


PROBLEMS = {
    "square": problem(12, 12),
    "ragged": problem(11, 13),
    "causal": problem(13, 13, mask=CAUSAL),
    "causal-more-keys": problem(5, 14, mask=CAUSAL),
    "causal-more-queries": problem(14, 5, mask=CAUSAL),
    "window": problem(17, 17, mask=CAUSAL & Window(4)),
    "window-both": problem(9, 15, mask=Window(2, 3)),
    "prefix": problem(12, 12, mask=Prefix(5)),
    "chunk": problem(14, 9, mask=Chunk(4)),
    "groups": problem(7, 9, B=2, H=6, Hk=2, mask=CAUSAL),
    "dv": problem(8, 9, D=5, Dv=2),
    "fp32": problem(8, 8, dtype=torch.float32, mask=CAUSAL),
    "fp64": problem(5, 5, dtype=torch.float64),
    "no-key": problem(5, 0),
    "no-query": problem(0, 5),
    "packed": problem(13, 20, H=2, Hk=1, mask=CAUSAL, lengths=((4, 4), (7, 9), (0, 3), (2, 4))),
}
everywhere = pytest.mark.parametrize("it", PROBLEMS.values(), ids=PROBLEMS)


class Memory:
    """Counts the bytes that pass an LRU cache of `capacity` elements; without one, every access."""

    def __init__(self, capacity: int | None = None) -> None:
        self.read = self.written = 0
        self.capacity = capacity
        self.held: OrderedDict[tuple, tuple[int, bool]] = OrderedDict()  # address -> bytes, whether it was changed

    def load(self, size: int, *address: object) -> None:
        if self.capacity is None or address not in self.held:
            self.read += size
            self._hold(address, size, False)
        else:
            self.held.move_to_end(address)

    def store(self, size: int, *address: object) -> None:
        if self.capacity is None:
            self.written += size
        else:
            self._hold(address, size, True)

    def _hold(self, address: tuple, size: int, changed: bool) -> None:
        if self.capacity is None:
            return
        self.held.pop(address, None)
        self.held[address] = (size, changed)
        while len(self.held) > self.capacity:
            _, (size, changed) = self.held.popitem(last=False)
            self.written += size * changed

    def flush(self) -> io.Traffic:
        self.written += sum(size for size, changed in self.held.values() if changed)
        self.held.clear()
        return io.Traffic(self.read, self.written)


def blocks(length: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, length)) for start in range(0, length, size))


def walk_forward(it: Problem, block_t: int, block_s: int, memory: Memory) -> None:
    """Performs the loads and stores of FlashAttention-2's Algorithm 1, one element at a time."""
    spec, e = it.spec, it.spec.dtype.itemsize
    for b, (T, S) in enumerate(it.sizes.sequences):
        sees = materialise(spec.mask, T, S)
        for h in range(it.sizes.H):
            hk = h // spec.group
            for rows in blocks(T, block_t):
                for t in rows:
                    [memory.load(e, "q", b, h, t, c) for c in range(spec.dim)]
                for keys in blocks(S, block_s):
                    if not sees[rows.start : rows.stop, keys.start : keys.stop].any():
                        continue
                    for j in keys:
                        [memory.load(e, "k", b, hk, j, c) for c in range(spec.dim)]
                        [memory.load(e, "v", b, hk, j, c) for c in range(spec.dim_v)]
                for t in rows:
                    [memory.store(e, "o", b, h, t, c) for c in range(spec.dim_v)]
                    memory.store(max(e, 4), "lse", b, h, t)


def walk_backward(it: Problem, block_t: int, block_s: int, memory: Memory) -> None:
    """Performs FlashAttention-2's Algorithm 2: the query heads of a key head inside its key tile, dq in a wide buffer."""
    spec, e = it.spec, it.spec.dtype.itemsize
    wide = max(e, 4)
    for b, (T, S) in enumerate(it.sizes.sequences):
        sees = materialise(spec.mask, T, S)
        for h in range(it.sizes.H):
            for t in range(T):
                for c in range(spec.dim_v):
                    memory.load(e, "o", b, h, t, c)
                    memory.load(e, "do", b, h, t, c)
                memory.store(wide, "delta", b, h, t)
                [memory.store(wide, "sum", b, h, t, c) for c in range(spec.dim)]
        for hk in range(it.sizes.Hk):
            for keys in blocks(S, block_s):
                for j in keys:
                    [memory.load(e, "k", b, hk, j, c) for c in range(spec.dim)]
                    [memory.load(e, "v", b, hk, j, c) for c in range(spec.dim_v)]
                for h in range(hk * spec.group, (hk + 1) * spec.group):
                    for rows in blocks(T, block_t):
                        if not sees[rows.start : rows.stop, keys.start : keys.stop].any():
                            continue
                        for t in rows:
                            for c in range(spec.dim):
                                memory.load(e, "q", b, h, t, c)
                                memory.load(wide, "sum", b, h, t, c)
                                memory.store(wide, "sum", b, h, t, c)
                            [memory.load(e, "do", b, h, t, c) for c in range(spec.dim_v)]
                            memory.load(wide, "lse", b, h, t)
                            memory.load(wide, "delta", b, h, t)
                for j in keys:
                    [memory.store(e, "dk", b, hk, j, c) for c in range(spec.dim)]
                    [memory.store(e, "dv", b, hk, j, c) for c in range(spec.dim_v)]
        if wide != e:
            for h in range(it.sizes.H):
                for t in range(T):
                    for c in range(spec.dim):
                        memory.load(wide, "sum", b, h, t, c)
                        memory.store(e, "dq", b, h, t, c)


def walk_pairs(it: Problem, phase: str, memory: Memory) -> None:
    """Touches the inputs of every visible pair and writes every output, as any schedule must."""
    spec, e = it.spec, it.spec.dtype.itemsize
    wide, backward = max(e, 4), phase == "bwd"
    for b, (T, S) in enumerate(it.sizes.sequences):
        sees = materialise(spec.mask, T, S)
        for h in range(it.sizes.H):
            hk = h // spec.group
            for t, j in sees.nonzero().tolist():
                for c in range(spec.dim):
                    memory.load(e, "q", b, h, t, c)
                    memory.load(e, "k", b, hk, j, c)
                [memory.load(e, "v", b, hk, j, c) for c in range(spec.dim_v)]
                if backward:
                    for c in range(spec.dim_v):
                        memory.load(e, "o", b, h, t, c)
                        memory.load(e, "do", b, h, t, c)
                    memory.load(wide, "lse", b, h, t)
                    memory.load(wide, "delta", b, h, t)
                    memory.store(wide, "delta", b, h, t)
        for h, t in ((h, t) for h in range(it.sizes.H) for t in range(T)):
            [memory.store(e, "dq" if backward else "o", b, h, t, c) for c in range(spec.dim if backward else spec.dim_v)]
            if not backward:
                memory.store(wide, "lse", b, h, t)
        for hk, j in ((hk, j) for hk in range(it.sizes.Hk) for j in range(S) if backward):
            [memory.store(e, "dk", b, hk, j, c) for c in range(spec.dim)]
            [memory.store(e, "dv", b, hk, j, c) for c in range(spec.dim_v)]


@everywhere
@pytest.mark.parametrize("tile", [(4, 3), (5, 5), (64, 64), (1, 1)], ids=str)
def test_the_tile_model_counts_every_access_of_the_tiled_forward(it: Problem, tile: tuple[int, int]) -> None:
    memory = Memory()
    walk_forward(it, *tile, memory)
    assert io.tiles(it, block_t=tile[0], block_s=tile[1]) == memory.flush()


@everywhere
@pytest.mark.parametrize("tile", [(4, 3), (5, 5), (64, 64)], ids=str)
def test_the_tile_model_counts_every_access_of_the_tiled_backward(it: Problem, tile: tuple[int, int]) -> None:
    memory = Memory()
    walk_backward(it, *tile, memory)
    assert io.tiles(it, "bwd", block_t=tile[0], block_s=tile[1]) == memory.flush()


@everywhere
@pytest.mark.parametrize("phase", ["fwd", "bwd"])
def test_compulsory_bytes_are_what_a_large_cache_leaves(it: Problem, phase: str) -> None:
    memory = Memory(capacity=1 << 20)
    walk_pairs(it, phase, memory)
    assert io.compulsory(it, phase) == memory.flush()


@pytest.mark.parametrize("name", ["square", "ragged", "causal", "causal-more-keys", "prefix", "groups", "dv", "packed"])
def test_the_tiled_forward_through_a_large_cache_moves_the_compulsory_bytes(name: str) -> None:
    it = PROBLEMS[name]
    memory = Memory(capacity=1 << 20)
    walk_forward(it, 4, 3, memory)
    seen, due = memory.flush(), io.compulsory(it)
    # in "packed" one sequence has keys that no query sees, and none of them is loaded
    assert seen == due


@pytest.mark.parametrize("name", ["causal", "window", "groups"])
def test_a_larger_cache_never_moves_more_from_the_tile_model_down_to_the_compulsory(name: str) -> None:
    it, moved = PROBLEMS[name], []
    for capacity in (1, 30, 60, 120, 1 << 20):
        memory = Memory(capacity)
        walk_forward(it, 4, 3, memory)
        moved.append(memory.flush().total)
    assert moved == sorted(moved, reverse=True)
    assert moved[0] == io.tiles(it, block_t=4, block_s=3).total
    assert moved[-1] >= io.compulsory(it).total
    assert moved[0] > moved[-1]


def test_larger_query_tiles_move_less() -> None:
    it = CASES["d64-causal-2k"].problem()
    by_tile = [io.tiles(it, block_t=block_t).total for block_t in (16, 32, 64, 128, 256)]
    assert by_tile == sorted(by_tile, reverse=True)


@everywhere
def test_standard_attention_is_the_sum_of_its_operations(it: Problem) -> None:
    spec = it.spec
    forward, backward = io.Traffic(0, 0), io.Traffic(0, 0)
    for T, S in it.sizes.sequences:
        q, o = (torch.empty(it.sizes.H, T, d, dtype=spec.dtype, device="meta") for d in (spec.dim, spec.dim_v))
        k, v = (torch.empty(it.sizes.Hk, S, d, dtype=spec.dtype, device="meta") for d in (spec.dim, spec.dim_v))
        s = torch.empty(it.sizes.H, T, S, dtype=spec.dtype, device="meta")
        for read, written in (((q, k), s), ((s,), s), ((s, v), o)):
            forward += io.Traffic(sum(x.nbytes for x in read), written.nbytes)
        for read, written in (((s, o), v), ((o, v), s), ((s, s), s), ((s, k), q), ((s, q), k)):
            backward += io.Traffic(sum(x.nbytes for x in read), written.nbytes)
    assert io.standard(it) == forward
    assert io.standard(it, "bwd") == backward


def test_peaks_of_standard_and_tiled_attention() -> None:
    it = problem(100, 50, B=2, H=4, Hk=2, D=8, Dv=8)
    assert io.standard_peak(it) == 2 * (2 * 4 * 100 * 50) * 2
    assert io.standard_peak(it, "bwd") == 3 * (2 * 4 * 100 * 50) * 2
    assert io.flash_peak(it) == 2 * 4 * 100 * 4
    assert io.flash_peak(it, "bwd") == 2 * 4 * 100 * (4 + 4 + 8 * 4)
    packed = PROBLEMS["packed"]
    assert io.standard_peak(packed) == 2 * 2 * (16 + 63 + 0 + 8) * 2


@everywhere
def test_flops_are_two_for_each_multiply_and_add_of_a_visible_pair(it: Problem) -> None:
    spec = it.spec
    pairs = sum(int(materialise(spec.mask, T, S).sum()) for T, S in it.sizes.sequences) * it.sizes.H
    assert flops.count(it) == sum((2 * spec.dim, 2 * spec.dim_v)) * pairs
    assert flops.exponentials(it) == pairs
    if spec.dim == spec.dim_v:
        # the scores again, dv, dp, dq, dk
        assert flops.count(it, "bwd") == 5 * 2 * spec.dim * pairs


def test_flops_agree_with_torch_on_the_products_that_it_runs() -> None:
    it = problem(33, 40, B=2, H=3, Hk=3, D=16, Dv=8, dtype=torch.float32)
    q, k, v = (torch.randn(2, n, 3, d, requires_grad=True) for n, d in ((33, 16), (40, 16), (40, 8)))
    with FlopCounterMode(display=False) as forward:
        reference.attention(q, k, v)
    assert forward.get_total_flops() == flops.count(it)


def test_flops_of_a_causal_square_are_half_and_a_little() -> None:
    full, causal = (flops.count(problem(1000, 1000, mask=mask)) for mask in (FULL, CAUSAL))
    assert causal / full == pytest.approx(1001 / 2000)


class Box:
    """A machine with 1000 FLOP/s and the given bytes per second."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def rates(self, dtype: str) -> Rates:
        assert dtype == "bf16"
        return Rates(1000.0, self.bytes_per_s)


def test_the_roof_is_the_later_of_arithmetic_and_memory() -> None:
    it = PROBLEMS["causal"]
    work, moved = flops.count(it), io.compulsory(it).total
    fast, slow = roof(it, Box(1e9)), roof(it, Box(1.0))
    assert (fast.binds, fast.time_us) == ("compute", pytest.approx(work * 1e3))
    assert (slow.binds, slow.time_us) == ("memory", pytest.approx(moved * 1e6))
    assert fast.intensity == slow.intensity == work / moved
    assert fast.percent(2 * fast.time_us) == pytest.approx(50.0)


def test_one_query_has_the_intensity_of_its_group() -> None:
    for group in (1, 4, 8):
        it = problem(1, 100_000, H=8, Hk=8 // group, D=128, Dv=128)
        assert roof(it, Box(1.0)).intensity == pytest.approx(group, rel=1e-3)


def test_an_unknown_phase_is_refused_in_words() -> None:
    with pytest.raises(InvalidInput, match="phase is 'forward'; must be fwd or bwd"):
        io.tiles(PROBLEMS["square"], "forward")


def test_flops_of_a_recurrence_agree_with_torch_on_its_products() -> None:
    """Token by token: a key joins the state, a query reads it."""
    T, H, Hk, F, Dv = 7, 6, 2, 5, 3
    q, k, v = (torch.randn(n, d, requires_grad=True) for n, d in ((T * H, F), (T * Hk, F), (T * Hk, Dv)))
    with FlopCounterMode(display=False) as counter:
        o = torch.bmm(q[:, None], torch.bmm(k[:, :, None], v[:, None]).repeat_interleave(H // Hk, 0))
    assert counter.get_total_flops() == flops.recurrence(T, T, H, Hk, F, Dv)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    # the state again is the one product that autograd did not repeat
    assert counter.get_total_flops() + 2 * F * Dv * T * Hk == flops.recurrence(T, T, H, Hk, F, Dv, phase="bwd")
    projected = flops.recurrence(T, T, H, Hk, F, Dv, dim=4, rows=F) - flops.recurrence(T, T, H, Hk, F, Dv)
    assert projected == 2 * 4 * F * T * (H + Hk)
