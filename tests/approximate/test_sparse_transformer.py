"""Sparse Transformers: the sets pair by pair, the fast path against the definition, known answers, decoding, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.sparse_transformer.definition import sees
from tests.approximate.tolerance import assert_within, gradients, sentence_only

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = ["union", "split", "first", "second"]
# T, S, H, Hk, D, Dv, stride, and window or summary
SIZES = {
    "none": (0, 0, 2, 2, 8, 8, 4, 2),
    "one": (1, 1, 2, 1, 8, 4, 4, 3),
    "odd": (37, 37, 5, 1, 16, 8, 8, 3),
    "whole": (64, 64, 2, 2, 8, 8, 8, 8),
    "wide-group": (21, 21, 16, 1, 8, 8, 6, 2),
    "last-queries": (13, 50, 4, 2, 8, 8, 7, 4),
    "decode": (1, 50, 4, 2, 8, 8, 7, 5),
    "more-queries": (20, 9, 2, 2, 8, 8, 4, 2),
    "stride-one": (10, 10, 2, 2, 8, 8, 1, 1),
    "long-stride": (10, 10, 2, 2, 8, 8, 32, 32),
}


def inputs(T: int, S: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, *shape).to(dtype) for shape in ((T, H, D), (S, Hk, D), (S, Hk, Dv))]


def words(pattern: str, stride: int, other: int) -> dict:
    return {"pattern": pattern, "stride": stride, "window" if pattern == "strided" else "summary": other}


def answer(tensors: list[Tensor], dtype: torch.dtype, **options) -> dict[str, Tensor]:
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", tensors, strict=True)}
    o = ap.sparse_transformer(*leaves.values(), **options)
    assert o.dtype == dtype
    assert o.is_contiguous()
    return {"o": o} | gradients({"o": o}, leaves, tensors[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("size", SIZES)
def test_the_fast_path_equals_the_definition(size: str, pattern: str, heads: str, dtype: torch.dtype) -> None:
    *shape, stride, other = SIZES[size]
    tensors = inputs(*shape, dtype)
    options = words(pattern, stride, other) | {"sets": heads}
    found = answer(tensors, dtype, **options)
    exact, plain = (answer(tensors, x, backend="eager", **options) for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", ["union", "second"])
@pytest.mark.parametrize(
    ("T", "S", "stride", "summary"), [(300, 300, 64, 64), (700, 700, 64, 32), (150, 640, 128, 128), (65, 1000, 64, 16)]
)
def test_summaries_in_whole_tiles_equal_the_definition(
    T: int, S: int, stride: int, summary: int, heads: str, dtype: torch.dtype
) -> None:  # fmt: skip
    """A backend that is named takes the tiles on a CPU too."""
    tensors = inputs(T, S, 4, 2, 16, 16, dtype)
    options = {"pattern": "fixed", "stride": stride, "summary": summary, "sets": heads}
    found = answer(tensors, dtype, backend="tiled", **options)
    exact, plain = (answer(tensors, x, backend="eager", **options) for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype, terms=S)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("heads", HEADS)
def test_each_pair_is_that_of_the_text(pattern: str, heads: str) -> None:
    """The value of key j is the unit vector j, so o_i shows which keys have a weight: exactly those of the written sets."""
    T, H, stride, window, summary = 29, 3, 5, 7, 2
    q, k = torch.randn(1, T, H, 8), torch.randn(1, T, H, 8)
    v = torch.eye(T)[None, :, None].expand(1, T, H, T)
    options = words(pattern, stride, window if pattern == "strided" else summary)
    found = ap.sparse_transformer(q, k, v, sets=heads, **options)[0] > 0
    seen = sees(T, T, H, pattern, stride, window, summary, heads)
    for h in range(H):
        part = heads if heads != "split" else "first" if h < 2 else "second"
        for i in range(T):
            if pattern == "strided":
                near, far = set(range(i - window + 1, i + 1)), {j for j in range(i + 1) if (i - j) % stride == 0}
            else:
                near = set(range(i // stride * stride, i + 1))
                far = {j for j in range(i + 1) if j % stride in range(stride - summary, stride)}
            due = {"first": near, "second": far, "union": near | far}[part] & set(range(T))
            assert set(found[i, h].nonzero().flatten().tolist()) == due
            assert set(seen[h, i].nonzero().flatten().tolist()) == due


def test_the_papers_sets_at_their_defaults() -> None:
    """l = 128, c = 8: two blocks see 16 summary places, and the strided set of the last query has a key per 128."""
    seen = sees(512, 512, 1, "fixed", 128, 128, 8, "second")[0]
    assert seen[300].sum() == 16
    assert sees(512, 512, 1, "strided", 128, 128, 8, "union")[0, 511].sum() == 128 + 3


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("stride", [40, 100])
def test_a_stride_beyond_the_text_is_causal_attention(pattern: str, stride: int) -> None:
    q, k, v = inputs(40, 40, 4, 2, 16, 16)
    due = rt.attention(q, k, v, rt.CAUSAL)
    torch.testing.assert_close(ap.sparse_transformer(q, k, v, pattern=pattern, stride=stride, summary=3), due)


def test_a_stride_of_one_is_causal_attention_in_the_second_set() -> None:
    q, k, v = inputs(40, 40, 4, 2, 16, 16)
    due = rt.attention(q, k, v, rt.CAUSAL)
    torch.testing.assert_close(ap.sparse_transformer(q, k, v, stride=1, sets="second"), due)
    torch.testing.assert_close(ap.sparse_transformer(q, k, v, pattern="fixed", stride=9, summary=9, sets="second"), due)


def test_equal_scores_give_the_mean_of_the_set() -> None:
    """Known answer: zero keys, values that count places; the fixed set's mean is a closed form."""
    T, stride = 12, 4
    v = torch.arange(T, dtype=torch.float32).view(1, T, 1, 1)
    zero = torch.zeros(1, T, 1, 4)
    o = ap.sparse_transformer(zero, zero, v, pattern="fixed", stride=stride, summary=1).flatten()
    # place 9 sees the summaries 3 and 7, and 8 and 9
    assert o[9].item() == pytest.approx((3 + 7 + 8 + 9) / 4)
    # place 11 is a summary of its own block, and counts once
    assert o[11].item() == pytest.approx((3 + 7 + 8 + 9 + 10 + 11) / 6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_step_by_step_gives_the_rows_of_the_whole(pattern: str, heads: str) -> None:
    T = 30
    q, k, v = inputs(T, T, 4, 2, 8, 8)
    options = words(pattern, 7, 3) | {"sets": heads}
    whole = ap.sparse_transformer(q, k, v, **options)
    steps = [ap.sparse_transformer(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], **options) for t in range(T)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_strides_and_numpy_ints_and_large_scores() -> None:
    q, k, v = (x.transpose(1, 2) for x in (torch.randn(2, 4, 33, 8), torch.randn(2, 2, 33, 8), torch.randn(2, 2, 33, 8)))
    q = q * 1e4
    options = {"stride": np.int64(5), "window": np.int64(4)}
    found = ap.sparse_transformer(q, k, v, **options)
    due = ap.sparse_transformer(q.double(), k.double(), v.double(), backend="eager", **options)
    torch.testing.assert_close(found.double(), due, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("way", ["auto", "eager"])
def test_nan_in_a_later_token_stays_there(pattern: str, way: str) -> None:
    q, k, v = inputs(30, 30, 2, 2, 8, 8, B=1)
    options = words(pattern, 6, 2) | {"backend": way}
    due = ap.sparse_transformer(q, k, v, **options)
    k[:, 20], v[:, 20] = math.nan, math.inf
    found = ap.sparse_transformer(q, k, v, **options)
    torch.testing.assert_close(found[:, :20], due[:, :20])
    assert found[:, 20].isnan().all()
    # a token that does not see place 20
    hidden = [i for i in range(30) if not sees(30, 30, 1, pattern, 6, 2, 2, "union")[0, i, 20]]
    assert max(hidden) > 20
    assert found[:, hidden].isfinite().all()


def test_under_autocast_and_inference_mode_and_vmap() -> None:
    q, k, v = inputs(20, 20, 2, 2, 8, 8)
    due = ap.sparse_transformer(*(x.bfloat16() for x in (q, k, v)), stride=4)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(ap.sparse_transformer(q, k, v, stride=4), due)
    mapped = torch.vmap(lambda *x: ap.sparse_transformer(*(y[None] for y in x), stride=4)[0])(q, k, v)
    torch.testing.assert_close(mapped, ap.sparse_transformer(q, k, v, stride=4))


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"pattern": "dilated"}, "pattern is 'dilated'; must be 'strided' or 'fixed'"),
        ({"sets": "all"}, "sets is 'all'; must be 'union', 'split', 'first' or 'second'"),
        ({"stride": 0}, "stride is 0; must be an int of at least 1"),
        ({"stride": 2.5}, "stride is 2.5; must be an int of at least 1"),
        ({"window": -1}, "window is -1; must be an int of at least 1"),
        ({"pattern": "fixed", "window": 4}, "window is 4 with pattern 'fixed'"),
        ({"pattern": "fixed", "stride": 4, "summary": 5}, "summary is 5; stride is 4, and summary must be at most stride"),
        ({"scale": math.nan}, "scale is nan; must be a finite number"),
        ({"backend": "fast"}, "backend is 'fast'; must be"),
        ({"dropout": 0.1}, "sparse_transformer has no argument dropout: it has q, k, v"),
    ],
    ids=sentence_only,
)
def test_bad_input_is_one_sentence(options: dict, due: str) -> None:
    q, k, v = inputs(8, 8, 2, 2, 8, 8)
    with pytest.raises(rt.InvalidInput) as raised:
        ap.sparse_transformer(q, k, v, **options)
    assert due in str(raised.value)


def test_one_head_cannot_be_split() -> None:
    with pytest.raises(rt.InvalidInput, match="sets is 'split' and q has 1 head"):
        ap.sparse_transformer(*inputs(8, 8, 1, 1, 8, 8), sets="split")
