"""Attention to chosen blocks, by plain operations and in the kernels, against the definition."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.native_sparse import definition as native_sparse
from rooftile.approximate.native_sparse.selected import attend, block_choice
from rooftile.approximate.native_sparse.selected.attention import refusal
from rooftile.approximate.native_sparse.selected.gated_sum import gated_sum
from rooftile.approximate.native_sparse.selected.tiles import queries_for, tiles_of
from rooftile.exact.reference import pairs
from tests.approximate.tolerance import gradients
from tests.conformance.exact import ulp
from tests.grids import swept


class Shapes(NamedTuple):
    name: str
    B: int = 1
    T: int = 70
    S: int = 70
    H: int = 4
    Hk: int = 2
    D: int = 32
    Dv: int = 32
    n: int = 3
    block: int = 16


CASES = [
    Shapes("two sequences", B=2),
    Shapes("16 heads, more keys", T=40, S=100, H=16, Hk=1, D=16, Dv=24, n=4, block=32),
    Shapes("5 heads", B=2, T=33, S=33, H=5, Hk=1, n=2),
    Shapes("one head", T=20, S=64, H=2, Hk=2, D=64, Dv=64, n=4, block=64),
    Shapes("48 tokens", T=50, S=50, D=16, Dv=16, block=48),
    Shapes("one query", B=3, T=1, S=70),
    Shapes("no query", T=0, S=16, D=16, Dv=16),
    Shapes("no key", T=7, S=0, D=16, Dv=16),
    Shapes("no choice", T=7, S=20, D=16, Dv=16, n=0),
]


def made(it: Shapes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and choices: blocks past the end, none, and one twice among them."""
    torch.manual_seed(len(it.name))
    q, k, v = (torch.randn(it.B, *sizes) for sizes in ((it.T, it.H, it.D), (it.S, it.Hk, it.D), (it.S, it.Hk, it.Dv)))
    blocks = -(-it.S // it.block)
    chosen = torch.rand(it.B, it.T, it.Hk, max(blocks + 2, it.n)).argsort(-1)[..., : it.n].int()
    chosen[torch.rand(chosen.shape) < 0.2] = -1
    if it.n > 1:
        chosen[..., 1] = torch.where(torch.rand(chosen.shape[:-1]) < 0.1, chosen[..., 0], chosen[..., 1])
    return q, k, v, chosen


def definition(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    seen = native_sparse.sees_selected(chosen, k.shape[1], block, q.shape[2] // k.shape[2])
    return pairs.attention(q, k, v, seen, scale=0.3)


def ways(q: Tensor, v: Tensor, Hk: int, block: int) -> list[str]:
    """The backends that run here: the kernels too on a GPU and in the interpreter."""
    return ["plain"] + ["triton"] * (refusal(q, v, Hk, block) is None)


def total(o: Tensor, lse: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator).to(x) for x in (o, lse))
    return (o * do).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()


@pytest.mark.parametrize("it", CASES, ids=lambda it: it.name)
def test_equals_the_definition(it: Shapes) -> None:
    q, k, v, chosen = made(it)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    due = definition(*wide, chosen, it.block)
    for backend in ways(q, v, it.Hk, it.block):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        found = attend(*leaves, chosen, block_size=it.block, scale=0.3, backend=backend)
        for a, b in zip(found, due, strict=True):
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-5)
        for a, b in zip(
            torch.autograd.grad(total(*found), leaves), torch.autograd.grad(total(*due), wide, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


# each offset, and each dtype
@pytest.mark.parametrize(
    ("size", "dtype"), swept(product((1e3, 1e6, 1e8), (torch.float32, torch.bfloat16)), lambda case: case), ids=str
)
def test_scores_that_share_an_offset(size: float, dtype: torch.dtype) -> None:
    """Every second query has an outlier feature that all keys share."""
    q, k, v, chosen = made(Shapes("offset", B=2, D=16, Dv=16))
    k[..., 0], q[..., 0] = 1.0, 0.0
    q[:, 1::2, :, 0] = size / 0.3
    results = {}
    for name, kind in (("exact", torch.float64), ("plain", torch.float32), ("half", dtype)):
        leaves = {name: x.to(dtype).to(kind).requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)}
        outputs = dict(zip(("o", "lse"), definition(*leaves.values(), chosen, 16), strict=True))
        results[name] = outputs | gradients(outputs, leaves, dtype)
    for backend in ways(q.to(dtype), v, 2, 16):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)}
        outputs = dict(
            zip(("o", "lse"), attend(*leaves.values(), chosen, block_size=16, scale=0.3, backend=backend), strict=True)
        )
        found = outputs | gradients(outputs, leaves, dtype)
        for x, due in results["exact"].items():
            wrong, *usual = ((results[y] if isinstance(y, str) else y)[x].double() - due for y in (found, "plain", "half"))
            seen = due.isfinite()
            most = 2 * max(y[seen].abs().max() for y in usual) + 8 * ulp(dtype, due[seen].abs().max().item())
            assert wrong[seen].abs().max() <= most, (backend, x)


def test_packed_sequences_are_as_alone() -> None:
    lengths, block = ((40, 40), (0, 9), (17, 50), (33, 33)), 16
    parts = [made(Shapes(f"{n}", T=T, S=S, D=16, Dv=16)) for n, (T, S) in enumerate(lengths)]
    q, k, v, chosen = (torch.cat([part[n][0] for part in parts]) for n in range(4))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths, strict=True))
    for backend in ways(q, v, 2, block):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = attend(*leaves, chosen, block_size=block, scale=0.3, cu_q=cu_q, cu_k=cu_k, backend=backend)
        alone = [x.clone().requires_grad_() for x in (q, k, v)]
        due = []
        for b in range(len(lengths)):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            due.append(definition(alone[0][None, rows], alone[1][None, keys], alone[2][None, keys], chosen[None, rows], block))
        due_o, due_lse = torch.cat([x[0] for x, _ in due]), torch.cat([x[0] for _, x in due], dim=-1)
        torch.testing.assert_close(o, due_o, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse, due_lse, atol=2e-5, rtol=1e-5)
        found = torch.autograd.grad(total(o, lse), leaves)
        for a, b in zip(found, torch.autograd.grad(total(due_o, due_lse), alone), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_nan_shows_where_it_is_seen_and_nowhere_else() -> None:
    it = Shapes("nan", B=2, T=40, S=40, D=16, Dv=16)
    q, k, v, chosen = made(it)
    k[0, 20, 0, 1], v[1, 13, 1, 2] = math.nan, math.nan
    seen = native_sparse.sees_selected(chosen, 40, it.block, 2)
    due = torch.zeros(2, 40, 4, dtype=torch.bool)
    due[0, :, :2] = seen[0, :2, :, 20].T
    due[1, :, 2:] = seen[1, 2:, :, 13].T
    for backend in ways(q, v, it.Hk, it.block):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o, _ = attend(*leaves, chosen, block_size=it.block, scale=0.3, backend=backend)
        assert torch.equal(o.isnan().any(-1), due)
        dq, dk, dv = torch.autograd.grad(o.nan_to_num().sum(), leaves)
        assert dq[~due].isfinite().all()
        touched = (seen & due.transpose(1, 2)[..., None]).unflatten(1, (2, 2)).any(2).any(2).transpose(1, 2)  # (B, S, Hk)
        assert dk[~touched].isfinite().all()
        assert dv[~touched].isfinite().all()


def test_every_block_is_causal_attention() -> None:
    """Known answer: with all blocks chosen this is CAUSAL."""
    q, k, v = (torch.randn(1, 50, 4, 16) for _ in range(3))
    chosen = torch.arange(4, dtype=torch.int32).expand(1, 50, 4, 4)
    for backend in ways(q, v, 4, 16):
        o, lse = attend(q, k, v, chosen, block_size=16, scale=0.25, backend=backend)
        due, due_lse = rt.attention_with_lse(q, k, v, rt.CAUSAL)
        torch.testing.assert_close(o, due, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, due_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 100, 100, 4, 1, 16), (8, 4, 16, 4, 1, 2)),
        ((2, 17, 200, 10, 2, 32), (32, 16, 64, 3, 1, 1)),
        ((1, 20, 150, 2, 2, 16), (4, 4, 8, 16, 2, 2)),
        ((1, 5, 5, 2, 1, 16), (8, 4, 16, 4, 1, 2)),
        ((1, 40, 33, 2, 1, 16), (8, 4, 16, 4, 1, 2)),
        # several steps of the kernel
        ((1, 3, 2500, 4, 1, 16), (32, 16, 64, 6, 1, 2)),
    ],
)
def test_the_kernel_chooses_as_the_definition_does(sizes: tuple[int, ...], options: tuple[int, ...]) -> None:
    B, T, S, H, Hk, D = sizes
    length, stride, block, count, first, local = options
    torch.manual_seed(S)
    q, k = torch.randn(B, T, H, D), torch.randn(B, S, Hk, D)
    compressed = ap.compress(k, length=length, stride=stride)
    words = {"block_size": block, "count": count, "first": first, "length": length, "local": local, "stride": stride, "tokens": S}
    due = ap.choose_blocks(q, compressed, backend="eager", **words)
    assert torch.equal(ap.choose_blocks(q, compressed, backend="plain", **words), due)
    if block_choice.refusal(q, Hk, length, block, stride, count) is not None:
        with pytest.raises(rt.Unsupported, match="needs a CUDA GPU"):
            ap.choose_blocks(q, compressed, backend="triton", **words)
        return
    assert torch.equal(ap.choose_blocks(q, compressed, backend="triton", **words), due)


@pytest.mark.parametrize("block", [15, 31, 32])
def test_a_compressed_key_counts_in_both_blocks_that_it_reaches(block: int) -> None:
    """One key has all the weight, and begins in the last stride of a block; a step of the kernel ends with block 31."""
    q, compressed = torch.ones(1, 1, 2, 16), torch.zeros(1, 159, 1, 16)
    compressed[0, block * 4 + 3] = 9.0
    words = {"block_size": 16, "count": 3, "first": 0, "length": 8, "local": 1, "stride": 4, "tokens": 640}
    for backend in ["eager", "plain"] + ["triton"] * (block_choice.refusal(q, 1, 8, 16, 4, 3) is None):
        assert ap.choose_blocks(q, compressed, backend=backend, **words).flatten().tolist() == [block, block + 1, 39], backend


def test_a_known_lse_gives_the_same_choice() -> None:
    """The early queries see no compressed key."""
    q, k = torch.randn(1, 100, 4, 16), torch.randn(1, 100, 2, 16)
    compressed = ap.compress(k, length=8, stride=4)
    sizes = {"block_size": 16, "count": 4, "length": 8, "stride": 4}
    seen = native_sparse.sees_compressed(100, 100, compressed.shape[1], 8, 4, q.device)
    x = torch.einsum("bthd,bnhd->bhtn", q, compressed.repeat_interleave(2, 2)) / 4
    lse = x.masked_fill(~seen, -torch.inf).logsumexp(-1)
    due = ap.choose_blocks(q, compressed, backend="eager", **sizes)
    assert torch.equal(ap.choose_blocks(q, compressed, lse=lse, **sizes), due)
    with pytest.raises(rt.InvalidInput, match=r"lse is .*; must be a floating-point tensor \(B, H, T\) = \(1, 4, 100\)"):
        ap.choose_blocks(q, compressed, lse=lse[..., 1:], **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 33, 5, 80), (1, 1, 1, 16), (1, 0, 2, 16), (3, 700, 1, 128)])
def test_the_gated_sum_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [torch.randn(shape).to(dtype) for _ in range(3)] + [torch.rand(*shape[:-1], 3).to(dtype)]
    do = torch.randn(shape).to(dtype)
    answers = []
    for kind in (torch.float64, dtype):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        *branches, gates = leaves
        # with gaps between the rows
        branches = [torch.cat([x, x], -1)[..., : shape[-1]] for x in branches]
        wide = sum(x.double() * g.double() for x, g in zip(branches, gates.split(1, -1), strict=True))
        o = wide if kind == torch.float64 else gated_sum(tuple(branches), gates)
        answers.append([o, *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    for found, due in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(found.double(), due.double(), atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=2e-2)


def test_ties_go_to_the_lower_block() -> None:
    """All compressed keys are alike, so blocks in the middle of the text have the same score."""
    q, k = torch.randn(1, 20, 2, 16), torch.ones(1, 160, 1, 16)
    compressed, sizes = ap.compress(k, length=8, stride=4), {"block_size": 16, "count": 5, "length": 8, "stride": 4}
    chosen = ap.choose_blocks(q, compressed, first=1, local=2, tokens=160, **sizes)
    assert chosen[0, 10, 0].tolist() == [0, 1, 2, 8, 9]


def test_a_block_that_is_not_there_is_passed_over() -> None:
    """A GPU's choices are not read by the checks: the largest index times the size of a block is beyond 32 bits."""
    *_, chosen = made(Shapes("far", D=16, Dv=16))
    far = torch.where(chosen >= 5, 2**31 - 1, chosen)
    cu = torch.tensor([0, 70], dtype=torch.int32)
    tiles, due = (tiles_of(x.flatten(0, 1), cu, cu, 16, 16) for x in (far, chosen))
    assert torch.equal(tiles.counts, due.counts)
    assert int(tiles.entries[..., 0].max()) <= 4


@pytest.mark.parametrize(("group", "due"), [(1, 16), (2, 16), (4, 16), (5, 8), (16, 4), (64, 1), (128, 1)])
def test_the_rows_of_a_tile_fill_a_product(group: int, due: int) -> None:
    assert queries_for(group) == due


def test_the_union_of_a_tile_and_its_words() -> None:
    """Four queries of 16 heads to a tile; blocks of 16, the last of 3 tokens."""
    chosen = torch.tensor([[[0, 2]], [[2, -1]], [[1, 1]], [[9, 0]], [[2, 0]]], dtype=torch.int32)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    cu_k = torch.tensor([0, 35], dtype=torch.int32)
    tiles = tiles_of(chosen, cu, cu_k, 16, 4)
    assert tiles.table.tolist() == [[0, 4, 30, 0, 35], [4, 1, 34, 0, 35]]
    unions = [tiles.entries[0, n, : tiles.counts[0, n]].tolist() for n in range(2)]
    assert unions == [[[0, 0b1001], [1, 0b0100], [2, 0b0011]], [[0, 1], [2, 1]]]


# few and many blocks, small and large tiles of queries; the interpreter is slowest on the case for the sweep
@pytest.mark.parametrize(
    ("n", "queries"), [(1, 16), (1, 4), (3, 4), (7, 16), pytest.param(20, 2, marks=pytest.mark.sweep), (100, 16)]
)
def test_the_lists_of_the_kernels(n: int, queries: int) -> None:
    """Packed sequences, one without queries and one without keys; choices that repeat, and that are not there."""
    q = torch.randn(1, 1, 2, 16)
    if len(ways(q, q, 1, 16)) == 1:
        pytest.skip("needs a GPU or the interpreter")
    from rooftile.approximate.native_sparse.selected import kernels

    lengths, Hk = ((40, 40), (0, 9), (17, 50), (5, 0), (33, 20)), 3
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True))
    torch.manual_seed(n)
    chosen = torch.randint(-1, 5, (95, Hk, n), dtype=torch.int32)
    chosen[torch.rand(chosen.shape) < 0.1] = 2**31 - 1
    found, due = kernels.unions(chosen, cu_q, cu_k, 16, queries), tiles_of(chosen, cu_q, cu_k, 16, queries)
    assert torch.equal(found.counts, due.counts)
    used = due.table[:, 1] > 0
    assert torch.equal(found.table[used], due.table[used])
    assert not found.table[~used, 1].any()
    there = torch.arange(due.entries.shape[2]) < due.counts[..., None]
    assert torch.equal(found.entries[there], due.entries[there])
    lists = kernels.key_lists(chosen, cu_q, cu_k, 119, 16)
    places = 119 // 16 + 5
    for hk in range(Hk):
        for b, (T, S) in enumerate(lengths):
            for block in range(-(-S // 16)):
                at = hk * places + int(cu_k[b]) // 16 + b + block
                queries_of = lists.queries[lists.starts[at] : lists.starts[at + 1]]
                named = [t for t in range(T) if block in chosen[int(cu_q[b]) + t, hk] and t + S - T >= block * 16]
                assert queries_of[queries_of >= 0].tolist() == [int(cu_q[b]) + t for t in named]


# few queries to a tile with parts of several blocks, and many with parts of one
@pytest.mark.parametrize(
    ("queries", "each"), swept([(1, 3), (2, 5), (8, 2), (16, 1)], lambda case: [case] * (case in [(2, 5), (16, 1)]))
)
def test_any_tiles_and_parts_give_the_gradients(queries: int, each: int) -> None:
    """Tests tile sizes that calls do not choose, and lists in parts, which `rooftile bench native-sparse` times."""
    it = Shapes("parts", T=60, S=60, D=16, Dv=24)
    q, k, v, chosen = made(it)
    if "triton" not in ways(q, v, it.Hk, it.block):
        assert len(ways(q, v, it.Hk, it.block)) == 1
        return
    from rooftile.approximate.native_sparse.selected import kernels

    # the first block is everybody's
    chosen[..., 0] = 0
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    due, due_lse = definition(*wide, chosen, it.block)
    do = torch.randn(due.shape)
    of_leaves = torch.autograd.grad((due * do).sum(), wide)
    cu = torch.tensor([0, 60], dtype=torch.int32, device=q.device)
    tiles = tiles_of(chosen[0], cu, cu, it.block, queries)
    lists = kernels.key_lists(chosen[0], cu, cu, 60, it.block)
    assert int(lists.starts.diff().max()) > each
    o, lse = kernels.forward(q[0], k[0], v[0], tiles, 0.3, it.block)
    torch.testing.assert_close(o.double(), due[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse.T.double(), due_lse[0], atol=2e-5, rtol=1e-5)
    known = do[0], lse, (do[0] * o).sum(-1), torch.empty_like(lse), q[0], k[0], v[0]
    found = kernels.dq(*known, tiles, 0.3, it.block), *kernels.dkdv(*known, lists, cu, cu, 0.3, it.block, each=each)
    for a, b in zip(found, of_leaves, strict=True):
        torch.testing.assert_close(a.double(), b[0], atol=1e-4, rtol=1e-4)


def test_the_operator_compiles_and_is_refused_where_it_cannot_run() -> None:
    q, k, v, chosen = made(Shapes("compiled", D=16, Dv=16))

    def loss(q: Tensor) -> Tensor:
        return attend(q, k, v, chosen, block_size=16, scale=0.3)[0].square().sum()

    leaf = q.clone().requires_grad_()
    (due,) = torch.autograd.grad(loss(leaf), leaf)
    (found,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf), leaf)
    torch.testing.assert_close(found, due)
    with pytest.raises(rt.Unsupported, match="float64; has float32" if "triton" in ways(q, v, 2, 16) else "tensors are on cpu"):
        attend(q.double(), k.double(), v.double(), chosen, block_size=16, scale=0.3, backend="triton")
