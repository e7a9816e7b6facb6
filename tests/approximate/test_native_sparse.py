"""Native Sparse Attention: branches and their sum against the definition, known answers, decoding, packed texts, bad input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.native_sparse import compression, definition, selection
from rooftile.approximate.native_sparse.selected.block_choice import refusal
from rooftile.runtime.devices import INTERPRETED
from tests.approximate.tolerance import assert_within, gradients, sentence_only

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, S, H, Hk, D, Dv
SIZES = {
    "none": (0, 0, 2, 2, 8, 8),
    "one": (1, 1, 2, 1, 8, 4),
    "no-block": (7, 7, 2, 1, 8, 8),
    "one-block": (8, 8, 2, 1, 8, 8),
    "odd": (59, 59, 5, 1, 16, 8),
    "whole": (64, 64, 2, 2, 8, 8),
    "wide-group": (41, 41, 16, 1, 8, 8),
    "last-queries": (13, 70, 4, 2, 8, 8),
    "early-queries": (13, 15, 4, 2, 8, 8),
    "decode": (1, 70, 4, 2, 8, 8),
    "more-queries": (20, 12, 2, 2, 8, 8),
}
SMALL: dict[str, Any] = {"length": 8, "stride": 4, "block_size": 8}
COUNTS: dict[str, Any] = {"count": 4, "first": 1, "local": 2}


def inputs(T: int, S: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> dict[str, Tensor]:
    n = max((S - SMALL["length"]) // SMALL["stride"] + 1, 0)
    shapes = {"q": (T, H, D), "kc": (n, Hk, D), "vc": (n, Hk, Dv), "ks": (S, Hk, D), "vs": (S, Hk, Dv)}
    shapes |= {"kn": (S, Hk, D), "vn": (S, Hk, Dv), "gates": (T, H, 3)}
    return {name: torch.randn(B, *shape).to(dtype) for name, shape in shapes.items()}


def call(x: dict[str, Tensor], **options: Any) -> Tensor:
    options = SMALL | COUNTS | {"window": 11} | options
    return ap.native_sparse(x["q"], (x["kc"], x["vc"]), (x["ks"], x["vs"]), (x["kn"], x["vn"]), x["gates"], **options)


def answer(tensors: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    leaves = {n: x.to(dtype).requires_grad_() for n, x in tensors.items()}
    o = call(leaves, **options)
    assert o.dtype == dtype
    assert o.is_contiguous()
    return {"o": o} | gradients({"o": o}, leaves, tensors["q"].dtype)


def chosen_for(x: dict[str, Tensor]) -> Tensor:
    return ap.choose_blocks(x["q"], x["kc"], tokens=x["ks"].shape[1], **SMALL, **COUNTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_branches_equal_the_definition(size: str, dtype: torch.dtype) -> None:
    tensors = inputs(*SIZES[size], dtype)
    chosen = chosen_for(tensors)
    found = answer(tensors, dtype, chosen=chosen)
    exact, plain = (answer(tensors, x, chosen=chosen, backend="eager") for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype)
    # the function chooses what `choose_blocks` returns
    assert torch.equal(call(tensors), found["o"])


@pytest.mark.parametrize("size", SIZES)
def test_choices_and_scores_equal_the_definition(size: str) -> None:
    x = inputs(*SIZES[size])
    words = {"tokens": x["ks"].shape[1]} | SMALL | COUNTS
    chosen, scores = ap.choose_blocks_with_scores(x["q"], x["kc"], **words)
    due, due_scores = ap.choose_blocks_with_scores(x["q"], x["kc"], backend="eager", **words)
    torch.testing.assert_close(scores, due_scores)
    assert torch.equal(chosen, due)
    assert chosen.dtype == torch.int32
    assert scores.dtype == torch.float32


def test_scores_count_overlaps() -> None:
    """Known answer: a block's score adds each compressed key as often as their strides overlap."""
    B, T, H, n, blocks = 1, 1, 2, 9, 3
    p = torch.rand(B, H, T, n)
    for length, stride, block in ((8, 4, 12), (8, 4, 8), (4, 4, 8), (8, 2, 8)):
        due = torch.zeros(B, T, 1, blocks)
        for j in range(blocks):
            for i in range(n):
                tokens = set(range(i * stride, i * stride + length)) & set(range(j * block, (j + 1) * block))
                due[..., j] += p[..., i].sum(1) * len(tokens) / stride
        torch.testing.assert_close(definition.block_scores(p, blocks, H, length, stride, block), due)
        torch.testing.assert_close(selection.scores_of_blocks(p, blocks, H, length, stride, block), due)


def test_what_is_always_chosen_and_what_is_best() -> None:
    """The first block, the own one and the one before; then the best of the rest; -1 before there are enough."""
    x = inputs(64, 64, 2, 1, 8, 8, B=1)
    chosen, scores = ap.choose_blocks_with_scores(x["q"], x["kc"], **SMALL, **COUNTS)
    for t in range(64):
        own = t // 8
        always = {0, own, max(own - 1, 0)}
        rest = sorted(set(range(own + 1)) - always, key=lambda j: (-scores[0, t, 0, j].item(), j))
        due = sorted(always | set(rest[: 4 - len(always)]))
        assert chosen[0, t, 0].tolist() == due + [-1] * (4 - len(due))


def test_ties_go_to_the_lower_block() -> None:
    q, kc = torch.zeros(1, 640, 2, 4), torch.zeros(1, 159, 1, 4)
    chosen = ap.choose_blocks(q, kc, **SMALL, **COUNTS)
    # equal weights: blocks 1 to 77 have equal scores but for the first, whose compressed keys are fewer
    assert chosen[0, -1, 0].tolist() == [0, 1, 78, 79]


def test_pieces_change_nothing(monkeypatch) -> None:
    x = inputs(59, 70, 4, 2, 8, 8)
    due = answer(x, torch.float32)
    monkeypatch.setattr(selection, "PIECE", 2**12)
    found = answer(x, torch.float32)
    for name in due:
        torch.testing.assert_close(found[name], due[name])


def test_all_blocks_are_causal_attention_and_the_own_is_a_chunk() -> None:
    x = inputs(30, 30, 4, 2, 8, 8)
    q, k, v = x["q"], x["ks"], x["vs"]
    every = torch.arange(4, dtype=torch.int32).expand(2, 30, 2, 4)
    torch.testing.assert_close(ap.selected_attention(q, k, v, every, block_size=8), rt.attention(q, k, v, rt.CAUSAL))
    own = (torch.arange(30, dtype=torch.int32) // 8).view(1, 30, 1, 1).expand(2, 30, 2, 1)
    due = rt.attention(q, k, v, rt.CAUSAL & rt.Chunk(8))
    torch.testing.assert_close(ap.selected_attention(q, k, v, own, block_size=8), due)
    # a block that is there twice counts once, and the order is free
    first, none = torch.zeros_like(own), torch.full_like(own, -1)
    twice = ap.selected_attention(q, k, v, torch.cat([own, none, first, own], -1), block_size=8)
    torch.testing.assert_close(twice, ap.selected_attention(q, k, v, torch.cat([own, first], -1), block_size=8))
    torch.testing.assert_close(ap.selected_attention(q, k, v, torch.cat([none, own], -1), block_size=8), due)
    torch.testing.assert_close(ap.selected_attention(q, k, v, every.flip(-1), block_size=8), rt.attention(q, k, v, rt.CAUSAL))


def test_blocks_of_one_token_make_each_branch_causal_attention() -> None:
    """Known answer: without compression, with all blocks and a long window, the gates weigh three equal outputs."""
    x = inputs(20, 20, 4, 2, 8, 8)
    q, k, v, gates = x["q"], x["ks"], x["vs"], x["gates"]
    pair = ap.compress(k, length=1, stride=1), ap.compress(v, length=1, stride=1)
    assert torch.equal(pair[0], k)
    found = ap.native_sparse(q, pair, (k, v), (k, v), gates, length=1, stride=1, block_size=4, count=5, window=20)
    torch.testing.assert_close(found, rt.attention(q, k, v, rt.CAUSAL) * gates.sum(-1, keepdim=True))


def test_equal_keys_give_means_of_what_is_complete() -> None:
    """Known answer: zero keys and values that count tokens; a compressed key is seen from its last token on."""
    S = 13
    v = torch.arange(S, dtype=torch.float32).view(1, S, 1, 1)
    zero, compressed = torch.zeros(1, S, 1, 4), ap.compress(v, length=4, stride=2)
    assert compressed.flatten().tolist() == [1.5, 3.5, 5.5, 7.5, 9.5]
    means = [0.0] * 3 + [m for m in (1.5, 2.5, 3.5, 4.5, 5.5) for _ in range(2)]
    for branch, due in ((0, means), (2, [0, 0.5, *(t - 1.0 for t in range(2, S))])):
        gates = torch.zeros(1, S, 1, 3)
        gates[..., branch] = 1
        found = ap.native_sparse(
            zero, (zero[:, :5], compressed), (zero, v), (zero, v), gates, length=4, stride=2, block_size=4, count=3, window=3
        )
        torch.testing.assert_close(found.flatten(), torch.tensor(due))


def test_step_by_step_gives_the_rows_of_the_whole() -> None:
    x = inputs(40, 40, 4, 2, 8, 8)
    whole = call(x)
    for t in range(40):
        n = max((t + 1 - 8) // 4 + 1, 0)
        lengths = {"kc": n, "vc": n}
        step = {name: y[:, t : t + 1] if name in ("q", "gates") else y[:, : lengths.get(name, t + 1)] for name, y in x.items()}
        torch.testing.assert_close(call(step), whole[:, t : t + 1])


def test_packed_sequences_are_each_alone() -> None:
    lengths = [20, 0, 5, 33]
    parts = [inputs(n, n, 4, 2, 8, 8, B=1) for n in lengths]
    packed = {name: torch.cat([p[name][0] for p in parts]) for name in parts[0]}
    cu = torch.tensor([0, 20, 20, 25, 58], dtype=torch.int32)
    torch.testing.assert_close(call(packed, cu=cu), torch.cat([call(p)[0] for p in parts]))
    due = torch.cat([ap.compress(p["ks"], length=8, stride=4)[0] for p in parts])
    torch.testing.assert_close(ap.compress(packed["ks"], cu=cu, length=8, stride=4), due)


def test_the_kinds_of_compression() -> None:
    x = torch.randn(2, 21, 3, 4)
    blocks = torch.stack([x[:, i * 4 : i * 4 + 8] for i in range(4)], 1).transpose(2, 3)  # (B, n, Hk, l, D)
    words = {"length": 8, "stride": 4}
    torch.testing.assert_close(ap.compress(x, **words), blocks.mean(-2))
    w = torch.rand(3, 8)
    torch.testing.assert_close(ap.compress(x, phi=w, **words), (blocks * w[..., None]).sum(-2))
    torch.testing.assert_close(ap.compress(x, phi=w[0], **words), (blocks * w[0, :, None]).sum(-2))
    linear = torch.randn(1, 32, 6)
    torch.testing.assert_close(ap.compress(x, phi=linear, **words), blocks.flatten(3) @ linear[0])
    mlp = torch.nn.Sequential(torch.nn.Flatten(3), torch.nn.Linear(32, 5))
    places = torch.randn(3, 8, 4)
    torch.testing.assert_close(ap.compress(x, phi=mlp, places=places, **words), mlp(blocks + places))
    for phi in ("mean", w, linear, mlp):
        assert ap.compress(x[:, :7], phi=phi, **words).shape[1] == 0
        due = definition.compress(x, lambda y, phi=phi: compression._mapped(y, phi), None, 8, 4)
        torch.testing.assert_close(ap.compress(x, phi=phi, **words), due)


@pytest.mark.parametrize("way", ["auto", "eager"])
def test_nan_in_a_later_token_reaches_no_earlier_row(way: str) -> None:
    x = inputs(40, 40, 2, 1, 8, 8)
    due = call(x, backend=way)
    for name in ("ks", "vs", "kn", "vn"):
        x[name][:, 30] = math.nan
    # compressed keys 6 to 8 hold token 30; the first is complete at 31
    x["kc"][:, 6:8], x["vc"][:, 6:8] = math.nan, math.nan
    found = call(x, backend=way, chosen=chosen_for(inputs(40, 40, 2, 1, 8, 8)))
    torch.testing.assert_close(found[:, :8], due[:, :8])
    assert found[:, :30].isfinite().all()
    assert found[:, 30:32].isnan().any()


def test_large_scores_strides_and_numpy() -> None:
    x = inputs(30, 30, 4, 2, 8, 8)
    x = {name: y.transpose(1, 2).contiguous().transpose(1, 2) for name, y in x.items()}
    x["q"] = x["q"] * 1e3
    options = {"length": np.int64(8), "stride": np.int32(4), "window": np.int64(11)}
    chosen = chosen_for(x)
    found = answer(x, torch.float32, chosen=chosen, **options)
    exact, plain = (answer(x, d, chosen=chosen, backend="eager") for d in (torch.float64, torch.float32))
    assert_within(found, exact, plain, torch.float32, terms=10**6)


def test_under_autocast() -> None:
    x = inputs(30, 30, 4, 2, 8, 8)
    due = call({name: y.bfloat16() for name, y in x.items() if name != "gates"} | {"gates": x["gates"]})
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(call(x), due)


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"length": 6}, "length is 6; must be a multiple of stride, 4"),
        ({"block_size": 10}, "block_size is 10; must be a multiple of stride, 4"),
        ({"block_size": 4}, "length is 8; must be at most block_size, 4"),
        ({"count": 2}, "count is 2; first + local is 3, and count must be at least that"),
        ({"window": 0}, "window is 0; must be an int of at least 1"),
        ({"chosen": torch.zeros(2, 20, 2, 4)}, "chosen is a torch.float32 tensor (2, 20, 2, 4); must be an int32 tensor"),
        ({"chosen": torch.full((2, 20, 2, 4), 3)}, "chosen has values from 3 to 3; must be from -1 to 2"),
        ({"stride": 8}, "compressed has 4 keys; 20 tokens in blocks of 8 every 8 have 2"),
        ({"cu": torch.tensor([0, 20])}, "with cu it must be packed (total, H, D)"),
        ({"softcap": 3.0}, "native_sparse has no argument softcap"),
    ],
    ids=sentence_only,
)
def test_bad_input_is_one_sentence(options: dict, due: str) -> None:
    with pytest.raises(rt.InvalidInput) as raised:
        call(inputs(20, 20, 4, 2, 8, 8), **options)
    assert due in str(raised.value)


def test_bad_tensors_are_one_sentence() -> None:
    x = inputs(20, 20, 4, 2, 8, 8)
    for name, wrong, due in (
        ("gates", x["gates"].to("meta"), "gates is on meta; q is on cpu, and all inputs must be on one device"),
        ("gates", x["gates"][..., :2], "gates is a torch.float32 tensor (2, 20, 4, 2); must be a floating-point"),
        ("kn", x["kn"][:, :, :1], "near: v is (2, 20, 2, 8); must be like k"),
        ("vs", x["vs"][..., :4], "the branches have (key heads, value dim) [(2, 8), (2, 4), (2, 8)]; must agree"),
    ):
        with pytest.raises(rt.InvalidInput) as raised:
            call(x | {name: wrong})
        assert due in str(raised.value)
    pairs = {"compressed": (x["kc"], x["vc"]), "selected": (x["ks"], x["vs"]), "near": (x["kn"], x["vn"])}
    for name in pairs:
        for wrong, due in ((x["kc"], "is a torch.float32 tensor"), ((x["kc"],), "is a tuple of 1"), (None, "is None")):
            with pytest.raises(rt.InvalidInput, match=f"{name} {due}.*; must be a pair of keys and values"):
                ap.native_sparse(x["q"], **pairs | {name: wrong}, gates=x["gates"], **SMALL, **COUNTS)
    for wrong, due in (
        ({"phi": "max"}, "phi is 'max'; must be 'mean', a tensor or a function"),
        ({"phi": torch.zeros(5)}, "phi is a torch.float32 tensor (5,); must be a tensor (l,)"),
        ({"phi": lambda y: y}, "phi returned"),
        ({"places": torch.zeros(3, 3)}, "places is a torch.float32 tensor (3, 3); must be (l, D) or (Hk, l, D)"),
    ):
        with pytest.raises(rt.InvalidInput) as raised:
            ap.compress(x["ks"], length=8, stride=4, **wrong)
        assert due in str(raised.value)


def test_bad_packed_tensors_are_one_sentence() -> None:
    x = {name: y[0] for name, y in inputs(20, 20, 4, 2, 8, 8).items()}
    x["chosen"] = torch.zeros(20, 2, 4, dtype=torch.int32)
    for name, wrong, due in (
        ("kc", x["kc"][:3], "compressed has a torch.float32 tensor (3, 2, 8); must be packed, and these sequences have 4"),
        ("vc", None, "compressed has None; must be packed, and these sequences have 4 compressed keys in all"),
        ("ks", x["ks"][:9], "selected has a torch.float32 tensor (9, 2, 8); must be packed, and these sequences have 20"),
        ("vn", x["vn"][None], "near has a torch.float32 tensor (1, 20, 2, 8); must be packed"),
        ("gates", None, "gates is None; must be a floating-point tensor (total, H, 3) = (20, 4, 3)"),
        ("chosen", 3, "chosen is 3; must be an int32 tensor (total, Hk, n) = (20, 2, n)"),
    ):
        given = x | {name: wrong}
        with pytest.raises(rt.InvalidInput) as raised:
            call(given, chosen=given["chosen"], cu=torch.tensor([0, 20]))
        assert due in str(raised.value)


def test_the_choice_says_why_a_kernel_does_not_make_it() -> None:
    x = inputs(20, 20, 4, 2, 8, 8)
    choose = partial(ap.choose_blocks, x["q"], x["kc"], **SMALL, **COUNTS)
    with pytest.raises(rt.InvalidInput, match="no argument return_scores: call choose_blocks_with_scores, which returns"):
        choose(return_scores=True)
    with pytest.raises(rt.InvalidInput, match="backend is 'triton'; must be 'auto', 'eager' or 'plain'"):
        ap.choose_blocks_with_scores(x["q"], x["kc"], backend="triton", **SMALL, **COUNTS)
    with pytest.raises(rt.InvalidInput, match=r"lse is a torch\.int64 tensor .*; must be a floating-point tensor"):
        choose(lse=torch.zeros(2, 4, 20, dtype=torch.int64))
    for changed, due in (
        ({"count": 65}, "65 blocks to a query; has up to 64"),
        ({"block_size": 16 * SMALL["block_size"]}, "blocks of 128 and 8 tokens in strides of 4; has up to 32 strides in both"),
    ):
        sizes = SMALL | COUNTS | changed
        found = refusal(x["q"], 2, sizes["length"], sizes["block_size"], sizes["stride"], sizes["count"])
        assert found == (due if INTERPRETED else "tensors are on cpu; needs a CUDA GPU of sm80 (Ampere) or newer")
