"""Lists of blocks on Hopper: what the conformance suite tries in other dtypes and sizes than its kernels have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.exact import dispatch
from rooftile.exact.blocks import Blocks, packed
from rooftile.exact.masks import CAUSAL, FULL, Mask, Window
from rooftile.exact.spec import Options, Spec
from tests.conformance.exact import ulp

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
BF16 = torch.bfloat16


def tensors(T: int, S: int, H: int, Hk: int, D: int, B: int = 1) -> list[Tensor]:
    return [torch.randn(B, n, h, D, device="cuda", dtype=BF16) for n, h in ((T, H), (S, Hk), (S, Hk))]


def near(found: Tensor, due: Tensor) -> None:
    """Asserts that both are as near as two orders of one sum in bf16; rows that see nothing have an lse of -inf in both."""
    assert torch.equal(found == -math.inf, due == -math.inf)
    found, due = (x.masked_fill(x == -math.inf, 0.0) for x in (found, due))
    wrong = (found.double() - due.double()).abs()
    assert wrong.max().item() <= 8 * ulp(BF16, due.abs().max().item())
    assert wrong.mean().item() <= 2 * ulp(BF16, due.abs().mean().item())


def answer(inputs: list[Tensor], mask: Mask, blocks: Blocks | None, backend: str) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, lse = rt.attention_with_lse(*leaves, mask, blocks=blocks, backend=backend)
    torch.manual_seed(1)
    do = torch.randn_like(o)
    return [o, lse.to(BF16), *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("H", "Hk"), [(2, 2), (8, 1)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, CAUSAL & Window(300)], ids=str)
def test_all_blocks_are_the_mask_alone(mask: Mask, H: int, Hk: int, D: int) -> None:
    inputs = tensors(1000, 1200, H, Hk, D)
    blocks = Blocks.from_dense(torch.ones(8, 10, dtype=torch.bool, device="cuda"))
    for x, due in zip(answer(inputs, mask, blocks, "hopper"), answer(inputs, mask, None, "hopper"), strict=True):
        near(x, due)


@pytest.mark.parametrize("D", [64, 96, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_long_random_lists_equal_the_portable_kernels(mask: Mask, D: int) -> None:
    inputs = tensors(8192, 8192, 8, 2, D, B=2)
    blocks = Blocks.from_dense(torch.rand(2, 8, 64, 64, device="cuda") < 0.2)
    for x, due in zip(answer(inputs, mask, blocks, "hopper"), answer(inputs, mask, blocks, "triton"), strict=True):
        near(x, due)


def with_bits(blocks: Blocks, part: int) -> Blocks:
    """The same lists, with random bits for the first blocks of each."""
    rows, keys = blocks.block_size
    whole = torch.rand(*blocks.counts.shape, part, rows, keys, device="cuda") < 0.7
    return Blocks(blocks.counts, blocks.indices, blocks.block_size, packed(whole))


@pytest.mark.parametrize("D", [64, 96, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("size", [(128, 128), (256, 128)], ids=str)
def test_bits_equal_the_portable_kernels(size: tuple[int, int], mask: Mask, D: int) -> None:
    inputs = tensors(2050, 2300, 8, 2, D, B=2)
    keep = torch.rand(2, 8, -(-2050 // size[0]), -(-2300 // size[1]), device="cuda") < 0.4
    blocks = with_bits(Blocks.from_dense(keep, size), 2)
    for x, due in zip(answer(inputs, mask, blocks, "hopper"), answer(inputs, mask, blocks, "triton"), strict=True):
        near(x, due)


@pytest.mark.parametrize("part", [0, 2])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (64, 128), (192, 64)], ids=str)
def test_blocks_of_64_queries_equal_the_portable_kernels(size: tuple[int, int], mask: Mask, D: int, part: int) -> None:
    q, k, v = tensors(2050, 2300, 8, 2, D, B=2)
    keep = torch.rand(2, 8, -(-2050 // size[0]), -(-2300 // size[1]), device="cuda") < 0.3
    blocks = Blocks.from_dense(keep, size)
    blocks = with_bits(blocks, part) if part else blocks
    found, due = (rt.attention_with_lse(q, k, v, mask, blocks=blocks, backend=name) for name in ("hopper", "triton"))
    for x, other in zip(found, due, strict=True):
        near(x.to(BF16), other.to(BF16))


def test_packed_blocks_of_64_queries_with_bits_equal_the_portable_kernels() -> None:
    lengths = torch.tensor([0, 70, 70, 400, 401, 1000], dtype=torch.int32)
    cu = lengths.to("cuda")
    q, k, v = (torch.randn(1000, h, 128, device="cuda", dtype=BF16) for h in (4, 2, 2))
    keep = torch.rand(1, 4, 1000 // 64 + 5, 10, device="cuda") < 0.6
    blocks = with_bits(Blocks.from_dense(keep, (64, 64)), 3)
    found, due = (
        rt.attention_packed_with_lse(q, k, v, cu, cu, CAUSAL, blocks=blocks, backend=name) for name in ("hopper", "triton")
    )
    for x, other in zip(found, due, strict=True):
        near(x.to(BF16), other.to(BF16))


@pytest.mark.parametrize("D", [64, 128])
def test_bits_of_lists_of_one_step_equal_the_portable_kernels(D: int) -> None:
    """A program has few steps, and must not read the words of a step that was never copied in."""
    inputs = tensors(2048, 128, 2, 2, D)
    counts = (torch.arange(16, device="cuda") > 0).int()[None, None]
    blocks = with_bits(Blocks(counts, torch.zeros(1, 1, 16, 1, dtype=torch.int32, device="cuda")), 1)
    for x, due in zip(answer(inputs, FULL, blocks, "hopper"), answer(inputs, FULL, blocks, "triton"), strict=True):
        near(x, due)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_sparse_transformers_equal_their_definition(pattern: str) -> None:
    inputs = [x.requires_grad_() for x in tensors(3000, 3000, 2, 2, 128)]
    found, due = (ap.sparse_transformer(*inputs, pattern=pattern, stride=128, backend=name) for name in (None, "eager"))
    do = torch.randn_like(due)
    gradients, right = (torch.autograd.grad(o, inputs, do) for o in (found, due))
    for x, y in zip((found, *gradients), (due, *right), strict=True):
        near(x, y)


def test_a_block_mask_trains_on_hopper() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    inputs = tensors(1000, 1000, 4, 2, 128)
    document = torch.arange(1000, device="cuda") // 300

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    mask = flex.create_block_mask(same_document, 1, None, 1000, 1000, device="cuda")
    for x, due in zip(answer(inputs, mask, None, "hopper"), answer(inputs, mask, None, "triton"), strict=True):
        near(x, due)


@pytest.mark.parametrize("size", [(64, 64), (128, 128)], ids=str)
def test_a_nan_shows_only_where_a_bit_shows_it(size: tuple[int, int]) -> None:
    q, k, v = tensors(300, 500, 2, 2, 128)
    keep = torch.rand(1, 2, -(-300 // size[0]), -(-500 // size[1]), device="cuda") < 0.7
    blocks = with_bits(Blocks.from_dense(keep, size), 2)
    v[0, 150, 1, 2] = math.nan
    k[0, 70, 0, 3] = math.nan
    o = rt.attention(q, k, v, blocks=blocks, backend="hopper")
    visible = blocks.pairs(300, 500)
    assert torch.equal(o.isnan().any(-1)[0, :, 0], visible[0, 0, :, 70])
    assert torch.equal(o.isnan().any(-1)[0, :, 1], visible[0, 1, :, 150])


def test_a_list_and_its_complement_merged_are_the_whole() -> None:
    inputs = tensors(1500, 1500, 4, 2, 128)
    keep = torch.rand(1, 2, 12, 12, device="cuda") < 0.5
    parts = [rt.attention_with_lse(*inputs, CAUSAL, blocks=Blocks.from_dense(x), backend="hopper") for x in (keep, ~keep)]
    o, lse = rt.merge(parts)
    due, due_lse = rt.attention_with_lse(*inputs, CAUSAL, backend="hopper")
    near(o, due)
    torch.testing.assert_close(lse, due_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_a_block_that_is_not_there_is_passed_over(mask: Mask) -> None:
    q, k, v = tensors(300, 300, 2, 2, 64)
    right = [[0, 2], [1, 0], [2, 1]]
    far = [[0, 2, 3, -1, 2**30], [1, 0, 2**31 - 1, -(2**31), 3], [2, 1, 5, 5, 5]]
    spec = Spec(dtype=BF16, dim=64, dim_v=64, scale=0.2, mask=mask, block_size=(128, 128), device="sm90")
    found = []
    for indices in (right, far):
        counts = torch.full((1, 1, 3), len(indices[0]), dtype=torch.int32, device="cuda")
        options = Options(block_counts=counts, block_indices=torch.tensor(indices, dtype=torch.int32, device="cuda")[None, None])
        found.append(dispatch.BACKENDS["hopper"].forward(q, k, v, options, spec)[0])
    near(found[1], found[0])


def test_a_count_below_zero_is_an_empty_list() -> None:
    q, k, v = tensors(300, 300, 2, 2, 64)
    counts = torch.tensor([[[1, -5, 1]]], dtype=torch.int32, device="cuda")
    blocks = Blocks(counts, torch.zeros(1, 1, 3, 1, dtype=torch.int32, device="cuda"))
    o, lse = rt.attention_with_lse(q, k, v, blocks=blocks, backend="hopper")
    assert not o[:, 128:256].any()
    assert (lse[..., 128:256] == -math.inf).all()
    near(o[:, :128], rt.attention(q[:, :128], k[:, :128], v[:, :128], backend="hopper"))


def test_a_nan_shows_where_it_is_seen_and_nowhere_else() -> None:
    q, k, v = tensors(500, 700, 2, 2, 128, B=2)
    blocks = Blocks.from_dense(torch.rand(2, 2, 4, 6, device="cuda") < 0.5)
    k[1, 70, 0, 3], v[0, 150, 1, 2], q[0, 3, 1, 1] = math.nan, math.nan, math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = rt.attention_with_lse(*leaves, CAUSAL, blocks=blocks, backend="hopper")
    visible = blocks.pairs(500, 700) & rt.exact.masks.materialise(CAUSAL, 500, 700, o.device)
    due = torch.zeros(2, 500, 2, dtype=torch.bool, device="cuda")
    due[1, :, 0] |= visible[1, 0, :, 70]
    due[0, :, 1] |= visible[0, 1, :, 150]
    due[0, 3, 1] |= visible[0, 1, 3].any()
    assert torch.equal(o.isnan().any(-1), due)
    dq, dk, _ = torch.autograd.grad(o.nan_to_num().sum(), leaves)
    # a key that no lost row sees has a gradient
    clean = ~(visible & (due.mT[..., None])).any(2)
    assert dk.isfinite().all(-1).mT[clean].all()
    assert dq.isfinite().all(-1)[~due].all()


def test_a_graph_reads_lists_that_have_changed() -> None:
    inputs = tensors(1024, 1024, 2, 2, 128)
    blocks = Blocks.from_dense(torch.rand(8, 8, device="cuda") < 0.5)
    rt.attention(*inputs, blocks=blocks, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rt.attention(*inputs, blocks=blocks, backend="hopper")
    other = Blocks.from_dense(torch.rand(8, 8, device="cuda") < 0.5)
    blocks.counts.copy_(other.counts)
    blocks.indices.copy_(other.indices)
    graph.replay()
    near(o, rt.attention(*inputs, blocks=other, backend="hopper"))
