"""Reformer: the sort against the definition, rounds and duplicates, known answers, Transformers' layer, and bad input."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.reformer import definition
from rooftile.approximate.reformer.attention import usual_buckets
from rooftile.exact.reference import pairs
from tests import grids
from tests.approximate.tolerance import assert_within, gradients, sentence_only

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, H, Hk, D, Dv, chunk
SIZES = {
    "none": (0, 2, 2, 8, 8, 4),
    "one": (1, 2, 1, 8, 4, 4),
    "two": (2, 2, 1, 8, 4, 1),
    "odd": (37, 5, 1, 16, 8, 8),
    "whole": (32, 2, 2, 8, 8, 8),
    "wide-group": (21, 16, 1, 8, 8, 5),
    "one-chunk": (10, 2, 2, 8, 8, 16),
    "two-chunks": (13, 2, 2, 8, 8, 8),
}
MODES: dict[str, dict[str, Any]] = {
    "causal": {"mask": rt.CAUSAL},
    "full": {"mask": rt.FULL},
    "counted": {"mask": rt.CAUSAL, "duplicates": "counted"},
    "strict": {"mask": rt.CAUSAL, "strict": True},
}


def inputs(T: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, T, H, D).to(dtype), torch.randn(B, T, Hk, Dv).to(dtype)]


def answer(tensors: list[Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip(("qk", "v"), tensors, strict=True)}
    o = ap.reformer(*leaves.values(), **options)
    assert o.dtype == dtype
    assert o.is_contiguous()
    return {"o": o} | gradients({"o": o}, leaves, tensors[0].dtype)


def to_all_others(qk: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Attention to all other tokens with unit keys and scale 1; the token itself if there is none."""
    T = qk.shape[1]
    i, j = pairs.positions(T, T)
    seen = j < i if causal else j != i
    k = torch.nn.functional.normalize(qk, dim=-1)
    o, lse = pairs.attention(qk, k, v.repeat_interleave(qk.shape[2] // v.shape[2], dim=2), seen, scale=1.0)
    return torch.where((lse == -math.inf).mT[..., None], v.repeat_interleave(qk.shape[2] // v.shape[2], dim=2), o)


@pytest.mark.parametrize(
    ("size", "mode", "rounds", "dtype"), grids.swept(product(SIZES, MODES, (1, 3), DTYPES), grids.pairs), ids=str
)
def test_the_sort_equals_the_definition(size: str, mode: str, rounds: int, dtype: torch.dtype) -> None:
    *shape, chunk = SIZES[size]
    tensors = inputs(*shape, dtype)
    options = MODES[mode] | {"chunk": chunk, "hashes": ap.lsh(tensors[0], rounds, usual_buckets(shape[0], chunk))}
    found = answer(tensors, dtype, **options)
    exact, plain = (answer(tensors, x, backend="eager", **options) for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype)


@pytest.mark.parametrize("strict", [False, True])
def test_once_is_one_softmax_over_the_union_of_the_rounds(strict: bool) -> None:
    """Known answer: with ln N_ij the join of rounds weighs every pair of the union alike."""
    qk, v = inputs(40, 2, 2, 8, 8)
    hashes = ap.lsh(qk, 4, 8)
    seen = definition.sees(hashes, 4, True, strict)
    assert (seen.sum(0) > 1).any()
    assert seen.any(0).sum() > seen[0].sum()
    due, lse = pairs.attention(qk, definition.unit(qk), v, seen.any(0), scale=1.0)
    due = torch.where((lse == -math.inf).mT[..., None], v, due)
    torch.testing.assert_close(ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=4, strict=strict), due)


def test_counted_weighs_a_pair_by_its_rounds() -> None:
    """Known answer: equal scores; a pair that r rounds see has r shares."""
    T = 6
    qk, v = torch.zeros(1, T, 1, 4), torch.eye(T)[None, :, None]
    # round 0 sees all in two chunks; in round 1 tokens 0, 1, 5 and 2, 3, 4 are chunks, one after the other
    hashes = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]]).T[None, :, None].int()
    options = {"mask": rt.CAUSAL, "hashes": hashes, "chunk": 2}
    o = ap.reformer(qk, v, duplicates="counted", **options)[0, 5, 0]
    seen = definition.sees(hashes, 2, True, False)[:, 0, 0, 5]
    due = seen.sum(0).float()
    assert due.max() == 2
    assert due.min() == 0
    torch.testing.assert_close(o, due / due.sum())
    torch.testing.assert_close(ap.reformer(qk, v, duplicates="once", **options)[0, 5, 0], seen.any(0).float() / seen.any(0).sum())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [5, 9, 10])
def test_two_chunks_see_all_others(chunk: int, causal: bool) -> None:
    """Known answer: the first chunk sees the last of its own round, so that with two chunks or one nothing is hidden."""
    qk, v = inputs(10, 4, 2, 16, 8)
    mask = rt.CAUSAL if causal else rt.FULL
    found = ap.reformer(qk, v, mask, chunk=chunk, rounds=2, buckets=4)
    torch.testing.assert_close(found, to_all_others(qk, v, causal), atol=1e-4, rtol=1e-4)


def test_strict_in_one_bucket_is_a_window_of_earlier_tokens() -> None:
    """Known answer: with equal hashes the last `chunk` earlier tokens of the bucket are a window."""
    qk, v = inputs(30, 2, 2, 8, 8)
    hashes = torch.zeros(2, 30, 2, 2, dtype=torch.int32)
    found = ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=7, strict=True)
    i, j = pairs.positions(30, 30)
    due, _ = pairs.attention(qk, definition.unit(qk), v, (j < i) & (i - j <= 7), scale=1.0)
    torch.testing.assert_close(found[:, 1:], due[:, 1:])
    assert torch.equal(found[:, 0], v[:, 0])
    torch.testing.assert_close(ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=30, strict=True), to_all_others(qk, v),
                               atol=1e-4, rtol=1e-4)  # fmt: skip


def test_a_token_alone_gives_its_value() -> None:
    qk, v = inputs(5, 2, 1, 8, 8)
    hashes = torch.arange(5, dtype=torch.int32).view(1, 5, 1, 1).expand(2, 5, 2, 1)
    found = ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=3, strict=True)
    assert torch.equal(found, v.expand_as(found))


def test_hashes_follow_angles_and_ties_go_to_the_lower_bucket() -> None:
    x = torch.randn(2, 20, 3, 16)
    h = ap.lsh(x, 4, 8, seed=3)
    assert h.dtype == torch.int32
    assert torch.equal(h, ap.lsh(x * 7, 4, 8, seed=3))
    assert torch.equal(ap.lsh(-x, 4, 8, seed=3), (h + 4) % 8)
    assert not torch.equal(h, ap.lsh(x, 4, 8, seed=4))
    assert not torch.equal(h[..., 0], h[..., 1])
    assert set(h.unique().tolist()) == set(range(8))
    assert (ap.lsh(torch.zeros(1, 3, 1, 4), 2, 8) == 0).all()
    alike = ap.lsh(x[:, :, :1].expand(-1, -1, 2, -1), 4, 8)
    # each head has its own vectors
    assert not torch.equal(alike[:, :, 0], alike[:, :, 1])


def test_sorts_are_stable() -> None:
    """Ties of hashes are broken by place, also on long texts, where an unstable sort changes the order."""
    hashes = torch.zeros(1, 500, 1, 1, dtype=torch.int32)
    qk, v = inputs(500, 1, 1, 4, 4, B=1)
    found = ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=10)
    i, j = pairs.positions(500, 500)
    seen = ((i // 10 - j // 10) % 50 <= 1) & (j < i)
    due, _ = pairs.attention(qk, definition.unit(qk), v, seen, scale=1.0)
    torch.testing.assert_close(found[:, 1:], due[:, 1:])


@pytest.mark.parametrize(("T", "chunk", "due"), [(1024, 64, 32), (1000, 64, 16), (65536, 64, 2048), (1, 64, 2), (0, 64, 2)])
def test_buckets_are_a_power_of_two_up_to_2n_over_m(T: int, chunk: int, due: int) -> None:
    assert usual_buckets(T, chunk) == due


def test_strict_gives_the_rows_of_the_whole_step_by_step() -> None:
    qk, v = inputs(25, 2, 1, 8, 8)
    options: dict[str, Any] = {"mask": rt.CAUSAL, "strict": True, "buckets": 4, "chunk": 3, "rounds": 2}
    whole = ap.reformer(qk, v, **options)
    steps = [ap.reformer(qk[:, : t + 1], v[:, : t + 1], **options)[:, -1:] for t in range(25)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.filterwarnings("ignore")
def test_transformers_layer_at_one_round() -> None:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    T, H, D = 32, 2, 8
    config = ReformerConfig(
        attention_head_size=D, num_attention_heads=H, hidden_size=H * D, lsh_attn_chunk_length=4, num_buckets=8, num_hashes=1,
        is_decoder=True, lsh_attention_probs_dropout_prob=0.0, use_cache=False, axial_pos_embds=False,
    )  # fmt: skip
    layer = LSHSelfAttention(config).eval()
    x = torch.randn(2, T, H * D)
    qk, v = (project(x).unflatten(-1, (H, D)) for project in (layer.query_key, layer.value))
    hashes = ap.lsh(qk, 1, 8)
    due = layer(x, buckets=hashes.permute(0, 2, 3, 1).reshape(2, H, T).long()).hidden_states
    found = ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=4)
    torch.testing.assert_close(found.flatten(2), due, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_in_double_precision_shares_of_pairs_are_double(strict: bool) -> None:
    """Three rounds share pairs by log 3, which in fp32 would be wrong from the eighth digit on."""
    qk, v = (torch.randn(1, 30, 2, 8, dtype=torch.float64) for _ in range(2))
    call = partial(ap.reformer, qk, v, rt.CAUSAL, rounds=3, chunk=8, buckets=4, strict=strict)
    torch.testing.assert_close(call(), call(backend="eager"), atol=1e-13, rtol=1e-13)


def test_hostile_inputs() -> None:
    qk, v = inputs(30, 2, 2, 8, 8)
    qk[:, 3] = 0
    qk[:, 7] *= 1e5
    hashes = ap.lsh(qk, 2, 4)
    tensors, options = [qk, v], {"mask": rt.CAUSAL, "hashes": hashes, "chunk": 4}
    found = answer(tensors, torch.float32, **options)
    exact, plain = (answer(tensors, x, backend="eager", **options) for x in (torch.float64, torch.float32))
    assert_within(found, exact, plain, torch.float32)


@pytest.mark.parametrize("way", ["auto", "eager"])
def test_nan_in_a_token_reaches_only_who_sees_it(way: str) -> None:
    qk, v = inputs(30, 2, 2, 8, 8)
    hashes = ap.lsh(qk, 2, 4)
    options: dict[str, Any] = {"mask": rt.CAUSAL, "hashes": hashes, "chunk": 4, "backend": way}
    due = ap.reformer(qk, v, **options)
    qk[:, 20], v[:, 20] = math.nan, math.inf
    found = ap.reformer(qk, v, **options)
    seen = definition.sees(hashes, 4, True, False).any(0)[..., 20].mT  # (B, T, H)
    seen[:, 20] = True
    assert found[seen].isnan().all()
    torch.testing.assert_close(found[~seen], due[~seen])


def test_strides_autocast_and_numpy() -> None:
    qk, v = torch.randn(2, 4, 19, 8).transpose(1, 2), torch.randn(2, 2, 19, 8).transpose(1, 2)
    options: dict[str, Any] = {"mask": rt.CAUSAL, "rounds": np.int64(2), "chunk": np.int32(4), "buckets": np.int64(4)}
    torch.testing.assert_close(ap.reformer(qk, v, **options), ap.reformer(qk.contiguous(), v.contiguous(), **options))
    due = ap.reformer(qk.bfloat16(), v.bfloat16(), **options)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(ap.reformer(qk, v, **options), due)


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"buckets": 7}, "buckets is 7; must be even"),
        ({"chunk": 0}, "chunk is 0; must be an int of at least 1"),
        ({"rounds": 0}, "rounds is 0; must be an int of at least 1"),
        ({"seed": -1}, "seed is -1; must be an int from 0"),
        ({"duplicates": "twice"}, "duplicates is 'twice'; must be 'once' or 'counted'"),
        ({"strict": 1}, "strict is 1; must be True or False"),
        ({"strict": True}, "strict is True and mask is full"),
        ({"mask": rt.CAUSAL & rt.Window(3)}, "reformer has FULL and CAUSAL"),
        ({"mask": torch.ones(8, 8)}, "must be rooftile.FULL or rooftile.CAUSAL"),
        ({"hashes": torch.zeros(1, 8, 2, 1)}, "hashes is a torch.float32 tensor (1, 8, 2, 1); must be an int32 tensor"),
        ({"hashes": torch.zeros(2, 8, 2, 0, dtype=torch.int32)}, "hashes has no round"),
        ({"alibi": None}, "reformer has no argument alibi"),
    ],
    ids=sentence_only,
)
def test_bad_input_is_one_sentence(options: dict, due: str) -> None:
    with pytest.raises(rt.InvalidInput) as raised:
        ap.reformer(*inputs(8, 2, 2, 8, 8), **options)
    assert due in str(raised.value)


def test_bad_tensors_are_one_sentence() -> None:
    qk, v = inputs(8, 2, 2, 8, 8)
    with pytest.raises(rt.InvalidInput, match="lengths must agree, and v's heads divide qk's"):
        ap.reformer(qk, v[:, :5])
    with pytest.raises(rt.InvalidInput, match="qk is None; must be a tensor"):
        ap.reformer(None, v)
    with pytest.raises(rt.InvalidInput, match=r"v is torch\.float16; q is torch\.float32"):
        ap.reformer(qk, v.half())
