"""Routing Transformer: clusters against the definition, members, centroids, known answers, and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.routing.definition import normed
from tests.approximate.tolerance import assert_within, gradients, sentence_only

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, S, H, Hk, D, Dv, clusters, width
SIZES: dict[str, tuple[int, int, int, int, int, int, int, int | None]] = {
    "none": (0, 0, 2, 2, 8, 8, 3, None),
    "one": (1, 1, 2, 1, 8, 4, 3, None),
    "odd": (37, 37, 5, 1, 16, 8, 4, 7),
    "whole": (32, 32, 2, 2, 8, 8, 4, 8),
    "wide-group": (21, 21, 16, 1, 8, 8, 5, None),
    "one-cluster": (10, 10, 2, 2, 8, 8, 1, None),
    "more-clusters": (5, 5, 2, 2, 8, 8, 9, None),
    "last-queries": (9, 20, 4, 2, 8, 8, 3, 6),
}


def inputs(T: int, S: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, *shape).to(dtype) for shape in ((T, H, D), (S, Hk, D), (S, Hk, Dv))]


def answer(tensors: list[Tensor], dtype: torch.dtype, centroids: Tensor, mask: rt.Mask, **options: Any) -> dict[str, Tensor]:
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", tensors, strict=True)}
    o, _ = ap.routing(*leaves.values(), centroids, mask, **options)
    assert o.dtype == dtype
    assert o.is_contiguous()
    return {"o": o} | gradients({"o": o}, leaves, tensors[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [rt.CAUSAL, rt.FULL], ids=str)
@pytest.mark.parametrize("strict", [False, True], ids=["best", "strict"])
@pytest.mark.parametrize("size", SIZES)
def test_clusters_equal_the_definition(size: str, strict: bool, mask: rt.Mask, dtype: torch.dtype) -> None:
    *shape, c, width = SIZES[size]
    tensors, centroids = inputs(*shape, dtype), torch.randn(shape[2], c, shape[4])
    options: dict[str, Any] = {"strict": strict}
    if strict:
        options["members"] = torch.randint(0, c, (2, shape[1], shape[2]), dtype=torch.int32)
    else:
        options["members"] = ap.routing(*tensors, centroids, mask, width=width)[1]
    found = answer(tensors, dtype, centroids, mask, **options)
    exact, plain = (answer(tensors, x, centroids, mask, backend="eager", **options) for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype)


@pytest.mark.parametrize("mask", [rt.CAUSAL, rt.FULL], ids=str)
@pytest.mark.parametrize("c", [1, 3])
def test_clusters_of_the_whole_text_are_exact_attention(c: int, mask: rt.Mask) -> None:
    """Known answer: every cluster holds every token, and the mean of equal outputs is the output."""
    q, k, v = inputs(20, 20, 4, 2, 16, 8)
    due = rt.attention(normed(q), normed(k), v, mask)
    found, members = ap.routing(q, k, v, torch.randn(4, c, 16), mask, width=20)
    torch.testing.assert_close(found, due)
    assert torch.equal(members.queries, torch.arange(20, dtype=torch.int32).expand(2, 4, c, 20))
    torch.testing.assert_close(ap.routing(q, k, v, torch.randn(4, 1, 16), mask, strict=True)[0], due)


def test_separated_clusters_are_attention_of_each_alone() -> None:
    """Known answer: tokens near orthogonal centroids; each group attends to itself, by place."""
    c, T, D = 4, 24, 8
    base = normed(torch.randn(c, D))
    group = torch.arange(T) % c
    q = (base[group] + 0.01 * torch.randn(T, D))[None, :, None]
    v = torch.randn(1, T, 1, 8)
    for strict in (False, True):
        found, _ = ap.routing(q, q, v, base[None], rt.CAUSAL, strict=strict)
        for n in range(c):
            own = group == n
            due = rt.attention(normed(q)[:, own], normed(q)[:, own], v[:, own], rt.CAUSAL)
            torch.testing.assert_close(found[:, own], due)


def test_a_token_of_two_clusters_gets_their_mean_and_one_of_none_gets_zero() -> None:
    q, k, v = inputs(6, 6, 1, 1, 8, 8, B=1)
    queries = torch.tensor([[[[0, 1, 3], [1, 4, 5]]]], dtype=torch.int32)
    keys = torch.tensor([[[[0, 1, 2], [0, 4, 5]]]], dtype=torch.int32)
    found, _ = ap.routing(q, k, v, torch.randn(1, 2, 8), members=ap.Members(queries, keys))
    parts = [rt.attention(normed(q[:, 1:2]), normed(k[:, x]), v[:, x]) for x in ([0, 1, 2], [0, 4, 5])]
    torch.testing.assert_close(found[:, 1:2], sum(parts) / 2)
    assert (found[:, 2] == 0).all()


def test_causal_goes_by_place_and_not_by_rank() -> None:
    """A cluster's second query is at place 1, and its second key at place 3: by rank it would be seen."""
    q, k, v = inputs(5, 5, 1, 1, 8, 8, B=1)
    members = ap.Members(torch.tensor([[[[0, 1]]]]).int(), torch.tensor([[[[0, 3]]]]).int())
    found, _ = ap.routing(q, k, v, torch.randn(1, 1, 8), rt.CAUSAL, members=members)
    torch.testing.assert_close(found[:, 1], v[:, 0])


def test_ties_go_to_the_lower_place_and_the_lower_cluster() -> None:
    q = torch.ones(1, 300, 1, 4)
    _, members = ap.routing(q, q, q, torch.zeros(1, 2, 4), width=5)
    assert torch.equal(members.keys[0, 0, 1], torch.arange(5, dtype=torch.int32))
    assert torch.equal(members.queries[0, 0, 0], torch.arange(5, dtype=torch.int32))
    _, clusters = ap.routing(q, q, q, torch.zeros(1, 2, 4), strict=True)
    assert (clusters == 0).all()


def test_members_are_chosen_in_fp32_and_the_width_is_n_over_c() -> None:
    q, k, v = inputs(50, 50, 2, 2, 16, 16)
    centroids = torch.randn(2, 8, 16)
    _, members = ap.routing(q, k, v, centroids)
    assert members.keys.shape == (2, 2, 8, 7)
    score = torch.einsum("bthd,hcd->bhct", normed(k), centroids)
    best = score.topk(7).indices.sort(-1).values
    assert torch.equal(members.keys.long(), best)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = ap.routing(q, k, v, centroids)
    _, due = ap.routing(q.bfloat16(), k.bfloat16(), v.bfloat16(), centroids)
    assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))


@pytest.mark.parametrize("mask", [rt.CAUSAL, rt.FULL], ids=str)
def test_strict_with_earlier_tokens(mask: rt.Mask) -> None:
    """The queries may be the last tokens: step by step gives the rows of the whole, as clusters do not change."""
    q, k, v = inputs(20, 20, 4, 2, 8, 8)
    centroids = torch.randn(4, 3, 8)
    whole, clusters = ap.routing(q, k, v, centroids, rt.CAUSAL, strict=True)
    steps = [
        ap.routing(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], centroids, mask, strict=True, members=clusters[:, : t + 1])[0]
        for t in range(20)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_centroids_move_to_the_mean_of_their_members() -> None:
    q, k, v = inputs(6, 6, 1, 1, 8, 8)
    centroids = torch.randn(1, 3, 8)
    members = torch.zeros(2, 6, 1, dtype=torch.int32)
    members[:, 3:] = 1
    found = ap.update_centroids(centroids, q, k, members, decay=0.9)
    due = (normed(q)[:, :3].mean((0, 1, 2)) + normed(k)[:, :3].mean((0, 1, 2))) / 2
    torch.testing.assert_close(found[0, 0], 0.9 * centroids[0, 0] + 0.1 * due)
    # an empty one stays
    assert torch.equal(found[0, 2], centroids[0, 2])
    _, both = ap.routing(q, k, v, centroids, width=4)
    found = ap.update_centroids(centroids, q, k, both, decay=0.0)
    for c in range(3):
        rows = [[normed(x)[b, y[b, 0, c].long(), 0] for b in range(2)] for x, y in zip((q, k), both, strict=True)]
        means = [torch.cat(x).mean(0) for x in rows]
        torch.testing.assert_close(found[0, c], (means[0] + means[1]) / 2)


def test_a_centroid_without_queries_moves_to_its_keys() -> None:
    q, k, _ = inputs(4, 10, 2, 1, 8, 8)
    clusters = torch.zeros(2, 10, 2, dtype=torch.int32)
    clusters[:, :6] = 1
    found = ap.update_centroids(torch.randn(2, 2, 8), q, k, clusters, decay=0.0)
    torch.testing.assert_close(found[0, 1], normed(k)[:, :6].mean((0, 1, 2)))


def test_the_commitment_loss_pulls_to_the_nearest_centroid() -> None:
    q, k, _ = inputs(7, 9, 4, 2, 8, 8)
    centroids = torch.randn(4, 3, 8)
    total = 0.0
    for x in (q, k.repeat_interleave(2, dim=2)):
        x = normed(x)
        score = torch.einsum("bthd,hcd->bthc", x, centroids)
        near = torch.stack([centroids[h][score[:, :, h].argmax(-1)] for h in range(4)], 2)
        total = total + (x - near).square().mean() / 2
    torch.testing.assert_close(ap.commitment_loss(q, k, centroids), 1e-4 * total)
    q.requires_grad_()
    ap.commitment_loss(q, k, centroids).backward()
    assert q.grad.abs().max() > 0
    # tokens at a centroid lose nothing
    at = normed(centroids)[:, 0].expand(1, 5, 4, 8)
    assert ap.commitment_loss(at, at, normed(centroids)[:, :1]).item() == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("way", ["auto", "eager"])
@pytest.mark.parametrize("strict", [False, True])
def test_nan_in_a_later_token_reaches_no_earlier_row(way: str, strict: bool) -> None:
    q, k, v = inputs(20, 20, 2, 2, 8, 8)
    centroids = torch.randn(2, 3, 8)
    due, members = ap.routing(q, k, v, centroids, rt.CAUSAL, strict=strict, backend=way)
    k[:, 15], v[:, 15] = math.nan, math.inf
    found, _ = ap.routing(q, k, v, centroids, rt.CAUSAL, strict=strict, backend=way, members=members)
    torch.testing.assert_close(found[:, :15], due[:, :15])
    assert found[:, 15:].isnan().any()


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"width": 0}, "width is 0; must be an int of at least 1"),
        ({"width": 3, "strict": True}, "width is 3 with strict; every token goes to one cluster"),
        ({"mask": rt.Window(3)}, "routing has FULL and CAUSAL"),
        ({"centroids": torch.randn(2, 3, 9)}, "centroids is (2, 3, 9); must be (H, c, D) = (2, c, 8), like the heads of q"),
        ({"centroids": torch.randn(3, 3, 8)}, "centroids is (3, 3, 8); must be (H, c, D) = (2, c, 8)"),
        ({"centroids": None}, "centroids is None; must be a floating-point tensor (H, c, D)"),
        ({"members": 3}, "members is 3; must be the Members (queries, keys)"),
        ({"members": (torch.zeros(2, 2, 3, 4), None)}, "members.queries is a torch.float32 tensor (2, 2, 3, 4); must be"),
        ({"members": (torch.full((2, 2, 3, 4), 9),) * 2}, "members.queries has values from 9 to 9; must be from 0 to 7"),
        ({"members": torch.full((2, 8, 2), 3), "strict": True}, "members has values from 3 to 3; must be from 0 to 2"),
        ({"dropout": 0.1}, "routing has no argument dropout"),
    ],
    ids=sentence_only,
)
def test_bad_input_is_one_sentence(options: dict, due: str) -> None:
    options = {"centroids": torch.randn(2, 3, 8)} | options
    with pytest.raises(rt.InvalidInput) as raised:
        ap.routing(*inputs(8, 8, 2, 2, 8, 8), **options)
    assert due in str(raised.value)


def test_the_weight_of_the_loss_is_a_number() -> None:
    q, k, _ = inputs(3, 3, 2, 2, 8, 8)
    with pytest.raises(rt.InvalidInput, match="commitment is 'small'; must be a finite number"):
        ap.commitment_loss(q, k, torch.randn(2, 3, 8), commitment="small")


def test_strict_needs_as_many_queries_as_keys_or_members() -> None:
    with pytest.raises(rt.InvalidInput, match="with strict they must agree, or pass members="):
        ap.routing(*inputs(3, 8, 2, 2, 8, 8), torch.randn(2, 3, 8), strict=True)
    with pytest.raises(rt.InvalidInput, match=r"decay is 1\.5; must be a number above 0 and at most 1"):
        ap.update_centroids(torch.randn(2, 3, 8), *inputs(3, 8, 2, 2, 8, 8)[:2], torch.zeros(2, 8, 2).int(), decay=1.5)
