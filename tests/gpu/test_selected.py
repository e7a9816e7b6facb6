"""Attention to chosen blocks on a GPU: the kernels beside the definition, in each dtype, with the paper's sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rooftile import approximate as ap
from rooftile.approximate.native_sparse.decoding import decode, decode_as_defined
from rooftile.approximate.native_sparse.selected import attend
from rooftile.hardware.clock import captured
from rooftile_lab.bench.native_sparse.variants import Sizes, Variant, complaint, variants
from tests.approximate.test_selected import definition
from tests.approximate.tolerance import assert_within

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("H", "Hk", "D", "Dv"), [(16, 1, 128, 128), (32, 8, 64, 64), (10, 2, 64, 64), (16, 1, 192, 128)])
def test_forward_and_gradients(dtype: torch.dtype, H: int, Hk: int, D: int, Dv: int, device: torch.device) -> None:
    B, T, block = 2, 700, 64
    q = torch.randn(B, T, H, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, T, Hk, dim, device=device, dtype=dtype) for dim in (D, Dv))
    chosen = ap.choose_blocks(q, ap.compress(k), count=5, block_size=block)
    wide, plain, leaves = ([x.to(kind).requires_grad_() for x in (q, k, v)] for kind in (torch.float64, dtype, dtype))
    do = torch.randn(B, T, H, Dv, device=device, dtype=dtype)
    answers = []
    for run, inputs in ((definition, wide), (definition, plain), (_kernels, leaves), (_kernels, leaves)):
        o, _ = run(*inputs, chosen, block)
        grads = torch.autograd.grad((o * do.to(o.dtype)).sum(), inputs)
        answers.append(dict(zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True)))
    exact, usual, found, again = answers
    assert all(torch.equal(found[name], again[name]) for name in found)
    # a key's gradient is the sum over all queries and heads that chose its block
    assert_within(found, exact, usual, dtype, terms=T * H // Hk)


@pytest.mark.parametrize("one", list(variants(16, stages=(3,))), ids=str)
def test_other_tiles_and_parts(one: Variant, device: torch.device) -> None:
    """The variants that `rooftile bench native-sparse` times, with lists of blocks in parts."""
    assert complaint(one, Sizes(1024, 16, 1, 128, 128, 64, 16), device, torch.bfloat16) is None


@pytest.mark.parametrize(("H", "Hk", "D", "Dv", "size"), [(64, 4, 128, 128, 16), (10, 2, 64, 64, 32), (16, 1, 192, 128, 16)])
def test_decoding_from_pages(H: int, Hk: int, D: int, Dv: int, size: int, device: torch.device) -> None:
    """Sequences of all lengths, in bf16: the kernels beside the gathering definition, also in a CUDA graph."""
    B, N, window, draw = 5, 400 * 16 // size, 512, partial(torch.randn, device=device, dtype=torch.bfloat16)
    sizes = {
        "length": 32,
        "stride": 16,
        "block_size": 64,
        "count": 16,
        "first": 1,
        "local": 2,
        "window": window,
        "scale": D**-0.5,
    }
    pairs_of = [(draw(B * N, rows, Hk, D), draw(B * N, rows, Hk, Dv)) for rows in (size // 16, size, size)]
    table = torch.randperm(B * N, device=device).int().view(B, N)
    lengths = torch.tensor([N * size, 1, 700, 0, 3333], device=device).int()
    call = draw(B, H, D), draw(B, H, 3).sigmoid(), *pairs_of, table, table.flip(0), lengths
    tensors = [x for pair in pairs_of for x in pair]
    wide = [x.float() for x in tensors]
    due = decode_as_defined(call[0].float(), call[1].float(), wide, *call[5:], **sizes)
    found = decode(*call, **sizes)
    torch.testing.assert_close(found.float(), due, atol=2e-2, rtol=2e-2)
    replayed = torch.empty_like(found)
    graph = captured(lambda: replayed.copy_(decode(*call, **sizes)))
    graph.replay()
    assert torch.equal(replayed, found)


def _kernels(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, chosen, block_size=block, scale=0.3, backend="triton")


def test_the_choice(device: torch.device) -> None:
    q, k = torch.randn(2, 900, 16, 64, device=device), torch.randn(2, 900, 2, 64, device=device)
    compressed = ap.compress(k)
    due = ap.choose_blocks(q, compressed, backend="eager", count=6)
    assert torch.equal(ap.choose_blocks(q, compressed, backend="triton", count=6), due)
