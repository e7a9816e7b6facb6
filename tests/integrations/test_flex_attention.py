"""FlexAttention's arguments and masks, against its own eager result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import rooftile as rt
from rooftile.exact.blocks import block_mask as module
from rooftile.integrations.flex_attention import flex_attention
from tests.grids import pairs, swept

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

DOCUMENTS = torch.tensor([0] * 70 + [1] * 150 + [2] * 80)

MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() <= 40,
    "prefix": lambda b, h, i, j: (j < 100) | (i >= j),
    "documents": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "heads": lambda b, h, i, j: (i >= j) & ((i - j) % (h + 2) == 0),
    "batch": lambda b, h, i, j: j < 90 + 130 * b,
    "nothing": lambda b, h, i, j: (i < 0) & (j < 0),
    "all": lambda b, h, i, j: (i >= 0) & (j >= 0),
}


LENGTHS = ((300, 300), (130, 300), (300, 200))


@pytest.mark.parametrize(("name", "lengths", "size"), swept(product(MASKS, LENGTHS, (64, (128, 64))), pairs), ids=str)
def test_equals_flex_attention(name: str, lengths: tuple[int, int], size: int | tuple[int, int]) -> None:
    T, S = lengths
    q, k, v = (torch.randn(2, 2, n, 32) for n in (T, S, S))
    mask = create_block_mask(MASKS[name], 2, 2, T, S, device="cpu", BLOCK_SIZE=size)
    due, aux = torch_flex.flex_attention(q, k, v, block_mask=mask, scale=0.3, return_aux=torch_flex.AuxRequest(lse=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = flex_attention(*leaves, block_mask=mask, scale=0.3, return_lse=True)
    torch.testing.assert_close(o, due, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, aux.lse, atol=2e-5, rtol=2e-5)
    seen = create_mask(MASKS[name], 2, 2, T, S, device="cpu")
    assert torch.equal(rt.Blocks.from_block_mask(mask).pairs(T, S).expand(2, 2, T, S), seen)
    # PyTorch's has no backward on a CPU
    by_bias = rt.attention(*(x.transpose(1, 2) for x in leaves), bias=seen, scale=0.3, backend="eager")
    found = torch.autograd.grad(o.square().sum(), leaves)
    for a, b in zip(found, torch.autograd.grad(by_bias.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_block_mask_stands_where_a_mask_does() -> None:
    q, k, v = (torch.randn(1, 200, 4, 32) for _ in range(3))
    mask = create_block_mask(MASKS["causal"], None, None, 200, 200, device="cpu")
    torch.testing.assert_close(rt.attention(q, k, v, mask), rt.attention(q, k, v, rt.CAUSAL))
    assert "blocks(128x128)+bits" in rt.explain(q, k, v, mask)


def test_its_function_is_asked_once_and_only_for_blocks_in_part() -> None:
    asked = []

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        asked.append(torch.broadcast_shapes(i.shape, j.shape))
        return (i - j).abs() < 64

    mask = create_block_mask(near, None, None, 1024, 1024, device="cpu")
    asked.clear()
    q = torch.randn(1, 1024, 1, 32)
    for _ in range(2):
        rt.attention(q, q, q, mask)
    assert sum(shape.numel() for shape in asked) == 22 * 128 * 128
    assert rt.Blocks.from_block_mask(mask) is rt.Blocks.from_block_mask(mask)


def test_a_large_mask_is_converted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", 3 * 128 * 128)
    mask = create_block_mask(MASKS["window"], None, None, 1000, 1000, device="cpu")
    due = create_mask(MASKS["window"], 1, 1, 1000, 1000, device="cpu")
    assert torch.equal(rt.Blocks.from_block_mask(mask).pairs(1000, 1000), due)


def test_bits_beyond_their_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 10_000)
    mask = create_block_mask(MASKS["heads"], 1, 2, 300, 300, device="cpu")
    with pytest.raises(rt.InvalidInput, match="6 lists of up to 3 blocks that are seen in part"):
        rt.Blocks.from_block_mask(mask)


def test_a_mask_first_used_in_inference_serves_training_and_autocast() -> None:
    with torch.inference_mode():
        mask = create_block_mask(MASKS["window"], None, None, 200, 200, device="cpu")
        q = torch.randn(1, 2, 200, 32)
        due = flex_attention(q, q, q, block_mask=mask)
    leaf = q.clone().requires_grad_()
    o = flex_attention(leaf, leaf, leaf, block_mask=mask)
    torch.testing.assert_close(o, due)
    (grad,) = torch.autograd.grad(o.sum(), leaf)
    assert grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(q, q, q, block_mask=mask).dtype == torch.bfloat16


def test_groups_and_a_shared_batch() -> None:
    q, k, v = torch.randn(2, 4, 70, 32), torch.randn(1, 2, 70, 32), torch.randn(1, 2, 70, 32)
    with pytest.raises(rt.InvalidInput, match="enable_gqa=True"):
        flex_attention(q, k, v)
    everything = create_block_mask(MASKS["all"], 2, None, 70, 70, device="cpu")
    due = torch_flex.flex_attention(q, k, v, block_mask=everything, enable_gqa=True)
    torch.testing.assert_close(flex_attention(q, k, v, enable_gqa=True), due, atol=2e-5, rtol=2e-5)
    o, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=torch_flex.AuxRequest(lse=True))
    torch.testing.assert_close(o, due, atol=2e-5, rtol=2e-5)
    assert aux.lse.shape == (2, 4, 70)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"score_mod": lambda s, b, h, i, j: s}, "softcap=, alibi= and bias="),
        ({"kernel_options": {"BLOCK_M": 64}}, "a backend chooses its own tiles"),
        ({"return_aux": torch_flex.AuxRequest(max_scores=True)}, "asks for max_scores; there is lse"),
        ({"query": torch.randn(4, 8)}, r"query must be a tensor \(B, H, T, D\)"),
        ({"block_mask": "causal"}, "mask is 'causal'"),
        ({"block_mask": create_block_mask(MASKS["causal"], None, None, 128, 256, device="cpu")}, r"\(1, 1, 128, 256\)"),
        ({"block_mask": create_block_mask(MASKS["causal"], None, None, 70, 70, device="cpu", BLOCK_SIZE=32)}, "multiples of 64"),
    ],
)
def test_other_arguments_get_a_sentence(words: dict, sentence: str) -> None:
    q = torch.randn(1, 2, 70, 32)
    with pytest.raises(rt.InvalidInput, match=sentence):
        flex_attention(**{"query": q, "key": q, "value": q} | words)


def test_two_kinds_of_lists_at_once_are_refused() -> None:
    q = torch.randn(1, 70, 2, 32)
    mask = create_block_mask(MASKS["causal"], None, None, 70, 70, device="cpu")
    with pytest.raises(rt.InvalidInput, match="needs one of them"):
        rt.attention(q, q, q, mask, blocks=rt.Blocks.from_block_mask(mask))
    cu = torch.tensor([0, 70], dtype=torch.int32)
    with pytest.raises(rt.InvalidInput, match="BlockMask in a packed call"):
        rt.attention_packed(q[0], q[0], q[0], cu, cu, mask)
