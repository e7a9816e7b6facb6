"""Masks against a definition that tries every pattern, on hostile blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.weights.two_four import definition, two_four
from rooftile.weights.two_four.patterns import BITS, PATTERNS, table

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
INF = math.inf
# the committed table: a bit for each place of a block, row by row
COMMITTED = """
cc33 ca53 ac53 c693 6c93 c963 9c63 c5a3 5ca3 c3c3 a5c3 69c3 96c3 5ac3 3cc3 ca35 ac35 aa55
a695 6a95 a965 9a65 c3a5 a5a5 69a5 96a5 5aa5 3ca5 a3c5 3ac5 c639 6c39 a659 6a59 6699 c369
a569 6969 9669 5a69 3c69 65a9 56a9 63c9 36c9 c936 9c36 a956 9a56 c396 a596 6996 9696 5a96
3c96 9966 95a6 59a6 93c6 39c6 c53a 5c3a c35a a55a 695a 965a 5a5a 3c5a 659a 569a 956a 596a
55aa 53ca 35ca c33c a53c 693c 963c 5a3c 3c3c a35c 3a5c 639c 369c 936c 396c 53ac 35ac 33cc
"""


def some(N: int, K: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Weights of which many are as large as their neighbours, or zero."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(-2, 3, (N, K), generator=generator).float()
    w = torch.where(torch.rand(N, K, generator=generator) < 0.5, few, torch.randn(N, K, generator=generator))
    return w.to(dtype)


def chosen(four: list[float]) -> list[bool]:
    """The pair of four numbers with the largest sizes, of all six pairs; sizes are compared as a sorted list, then places."""

    def worth(pair: tuple[int, ...]) -> tuple[list[float], list[int]]:
        return sorted((abs(four[i]) for i in pair), reverse=True), [-i for i in pair]

    best = max(itertools.combinations(range(4), 2), key=worth)
    return [i in best for i in range(4)]


def patterns() -> Iterator[tuple[int, ...]]:
    """All 0/1 blocks of 4 x 4, flat, with two in every row and column, found among all 2^16."""
    for bits in range(1 << 16):
        flat = tuple(bits >> place & 1 for place in range(16))
        rows = [flat[4 * row : 4 * row + 4] for row in range(4)]
        if all(sum(row) == 2 for row in rows) and all(sum(column) == 2 for column in zip(*rows, strict=True)):
            yield flat


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_keeps_the_largest_pair_of_all_six(dtype: torch.dtype) -> None:
    w = some(16, 64, dtype)
    due = [[chosen(row[k : k + 4]) for k in range(0, 64, 4)] for row in w.double().tolist()]
    assert torch.equal(two_four(w), torch.tensor(due).flatten(1))


@pytest.mark.parametrize(
    ("four", "kept"),
    [
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 0, 0]),
        ([0.0, 0.0, 0.0, 0.0], [1, 1, 0, 0]),
        ([-0.0, 0.0, -0.0, 1.0], [1, 0, 0, 1]),
        ([1.0, -1.0, 2.0, 1.0], [1, 0, 1, 0]),
        ([1.0, 2.0, -2.0, 2.0], [0, 1, 1, 0]),
        ([INF, -INF, INF, 0.0], [1, 1, 0, 0]),
        ([5.0, 6.0, -INF, 7.0], [0, 0, 1, 1]),
        ([1e-45, 0.0, 2e-45, 1e-45], [1, 0, 1, 0]),
        ([0.0, 0.0, 3.0, 4.0], [0, 0, 1, 1]),
        ([3e38, -3e38, 3.2e38, 3.1e38], [0, 0, 1, 1]),
    ],
)
def test_hostile_groups(four: list[float], kept: list[int]) -> None:
    assert two_four(torch.tensor([four])).int().tolist() == [kept]


def test_there_are_90_patterns_in_the_committed_order() -> None:
    assert len(PATTERNS) == len(BITS) == 90
    assert table().shape == (16, 90)
    found = {tuple(int(x) for x in column) for column in table().T.tolist()}
    assert found == set(patterns())
    # lexicographic in the pairs of the rows: a tie goes to the lower number
    assert list(PATTERNS) == sorted(PATTERNS)
    assert [f"{bits:04x}" for bits in BITS] == COMMITTED.split()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_takes_the_best_of_all_patterns(dtype: torch.dtype) -> None:
    w = some(16, 32, dtype, seed=1)
    mask, scores, allowed = two_four(w, transposable=True), table().double().T, set(patterns())
    for rows, columns in itertools.product(range(0, 16, 4), range(0, 32, 4)):
        block = w[rows : rows + 4, columns : columns + 4].double().abs().flatten()
        sums = scores @ block
        kept = mask[rows : rows + 4, columns : columns + 4].flatten().double()
        assert float(kept @ block) >= float(sums.max()) * (1 - 1e-6)
        assert tuple(int(x) for x in kept) in allowed


def test_equal_sums_take_the_lower_number() -> None:
    first = torch.tensor([BITS[0] >> place & 1 for place in range(16)]).bool().view(4, 4)
    assert torch.equal(two_four(torch.ones(4, 4), True), first)
    assert torch.equal(two_four(torch.zeros(4, 4), True), first)
    assert torch.equal(two_four(torch.full((4, 4), -INF), True), first)
    # two patterns share the largest sum: of the block's last two rows each keeps what the other might
    block = torch.zeros(4, 4)
    block[0, :2] = 1.0
    sums = table().T @ block.flatten()
    lowest = int((sums == sums.max()).nonzero()[0])
    assert int((sums == sums.max()).sum()) > 1
    assert torch.equal(two_four(block, True).flatten(), table()[:, lowest].bool())


def test_what_is_2_4_already_stays() -> None:
    for transposable in (False, True):
        w = some(32, 64) * two_four(some(32, 64), transposable)
        assert not (w[~two_four(w, transposable)] != 0).any()
        mask = two_four(torch.randn(32, 64), transposable)
        assert torch.equal(two_four(torch.where(mask, 1.0, 0.0), transposable), mask)


def test_a_transposable_mask_is_2_4_both_ways() -> None:
    mask = two_four(torch.randn(64, 128), True)
    assert (mask.view(64, 32, 4).sum(-1) == 2).all()
    assert (mask.T.reshape(128, 16, 4).sum(-1) == 2).all()


def test_shares_that_are_kept_of_normal_numbers() -> None:
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    row, both = two_four(w), two_four(w, True)
    assert float((w * row).square().sum() / w.square().sum()) == pytest.approx(0.868, abs=0.003)
    assert float((w * row).abs().sum() / w.abs().sum()) == pytest.approx(0.745, abs=0.003)
    assert float((w * both).abs().sum() / w.abs().sum()) == pytest.approx(0.703, abs=0.003)


def test_many_blocks_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    w = some(16, 64)
    due = two_four(w, True)
    monkeypatch.setattr(definition, "BLOCKS", 5)
    assert torch.equal(two_four(w, True), due)


@pytest.mark.parametrize("transposable", [False, True])
def test_strides_modes_and_transforms(transposable: bool) -> None:
    wide = some(24, 96)
    due = two_four(wide[::2, ::2].contiguous(), transposable)
    assert torch.equal(two_four(wide[::2, ::2], transposable), due)
    assert torch.equal(two_four(wide.T.contiguous().T[::2, ::2], transposable), due)
    with torch.inference_mode():
        assert torch.equal(two_four(wide[::2, ::2], transposable), due)
    with torch.autocast("cpu"):
        assert torch.equal(two_four(wide[::2, ::2], transposable), due)
    leaf = torch.nn.Parameter(wide[::2, ::2].clone())
    assert not two_four(leaf, transposable).requires_grad
    several = torch.stack([some(8, 16, seed=n) for n in range(3)])
    each = torch.stack([two_four(w, transposable) for w in several])
    assert torch.equal(torch.vmap(lambda w: two_four(w, transposable))(several), each)
    last = torch.vmap(lambda w: two_four(w, transposable), in_dims=2)(several.permute(1, 2, 0))
    assert torch.equal(last, each)


def test_compiled() -> None:
    run = torch.compile(lambda w: two_four(w * 1.0, transposable=True), fullgraph=True, backend="eager")
    w = some(8, 16)
    assert torch.equal(run(w), two_four(w, True))


def test_meta_fake_and_empty() -> None:
    found = two_four(torch.empty(8, 16, device="meta"), True)
    assert (found.device.type, found.shape, found.dtype) == ("meta", (8, 16), torch.bool)
    with torch._subclasses.FakeTensorMode():
        assert two_four(torch.empty(8, 16)).shape == (8, 16)
    assert two_four(torch.empty(0, 16)).shape == (0, 16)
    assert two_four(torch.empty(4, 0), True).shape == (4, 0)


@pytest.mark.parametrize(
    ("w", "sentence"),
    [
        (torch.ones(4, 6), r"weight is \(4, 6\); K must be a multiple of 4"),
        (torch.ones(8), r"weight is torch.float32 \(8,\); must be a tensor \(N, K\)"),
        (torch.ones(4, 8, dtype=torch.int32), r"weight is torch.int32 \(4, 8\); must be a tensor"),
        ([[1.0] * 4], "weight is list; must be a tensor"),
        (torch.tensor([[1.0, 2.0, math.nan, 0.0]]), "weight is NaN at row 0, column 2"),
        (torch.full((4, 8), math.nan).to(torch.float8_e4m3fn), "weight is NaN at row 0, column 0"),
    ],
)
def test_bad_input(w: object, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        two_four(w)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"weight is \(6, 8\) and transposable is True; N must be a multiple of 4"):
        rt.sparsity.two_four(torch.ones(6, 8), transposable=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"decay": -1.0}, "decay is -1.0; must be a number of at least 0"),
        ({"decay": INF}, "decay is inf"),
        ({"refresh": 0}, "refresh is 0; must be a number of steps, 1 or more"),
        ({"refresh": 1.5}, "refresh is 1.5"),
        ({"freeze_from": -1}, "freeze_from is -1; must be a number of steps, 0 or more"),
        ({"refresh": True}, "refresh is True"),
    ],
)
def test_bad_recipes(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        rt.sparsity.Recipe(**options)  # type: ignore[arg-type]


def test_a_recipe_takes_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    assert rt.sparsity.Recipe(refresh=numpy.int64(3), decay=numpy.float32(0.5)).refresh == 3
