"""Loki: the rotation, choices by tokens and by pages, known answers, files, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from tests.approximate.tolerance import assert_within, gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# S, H, Hk, D, Dv
SIZES = {
    "one": (1, 2, 1, 8, 4),
    "odd": (37, 5, 1, 16, 8),
    "whole": (64, 4, 4, 8, 8),
    "wide-group": (50, 16, 1, 8, 8),
    "two-groups": (70, 4, 2, 16, 8),
}


def inputs(S: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, *shape).to(dtype) for shape in ((1, H, D), (S, Hk, D), (S, Hk, Dv))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("size", SIZES)
def test_the_chosen_keys_equal_the_definition(size: str, unit: str, turned: bool, dtype: torch.dtype) -> None:
    q, k, v = inputs(*SIZES[size], dtype)
    loki = ap.Loki.fit(torch.randn(100, *k.shape[2:]), dims=0.5, keep=0.3)
    k = loki.turn(k) if turned else k
    options = {"unit": unit, "turned": turned, "page": 4}
    chosen = loki.choose(q, k, **options)

    def answer(dtype: torch.dtype, way: str) -> dict[str, Tensor]:
        leaves = {n: x.to(dtype).requires_grad_(unit == "token") for n, x in zip("qkv", (q, k, v), strict=True)}
        o = loki.attend(*leaves.values(), chosen=chosen, backend=way, **options)
        assert o.dtype == dtype
        assert o.is_contiguous()
        return {"o": o} | (gradients({"o": o}, leaves, q.dtype) if unit == "token" else {})

    assert_within(answer(dtype, "auto"), answer(torch.float64, "eager"), answer(dtype, "eager"), dtype)


@pytest.mark.parametrize("unit", ["token", "page"])
def test_no_key_gives_zero(unit: str) -> None:
    q, k, v = inputs(0, 4, 2, 8, 8)
    assert (ap.Loki.fit(torch.randn(9, 2, 8)).attend(q, k, v, unit=unit) == 0).all()


@pytest.mark.parametrize("unit", ["token", "page"])
def test_keeping_all_keys_is_exact_attention(unit: str) -> None:
    q, k, v = inputs(45, 4, 2, 16, 8)
    loki = ap.Loki.fit(k, dims=0.1, keep=1)
    due = rt.attention(q, k, v)
    torch.testing.assert_close(loki.attend(q, k, v, unit=unit), due)
    torch.testing.assert_close(loki.attend(q, loki.turn(k), v, unit=unit, turned=True), due, atol=1e-5, rtol=1e-4)


def test_keys_of_few_dimensions_are_chosen_by_exact_scores() -> None:
    """Known answer: where all keys lie in a plane, two dimensions have all of every score, up to a number per query."""
    D, S, keep = 16, 60, 0.2
    plane = torch.linalg.qr(torch.randn(D, 2)).Q
    k = (torch.randn(S, 2) @ plane.T)[None, :, None] + 0.7
    q = torch.randn(1, 1, 3, D)
    loki = ap.Loki.fit(k, dims=2 / D, keep=keep)
    assert loki.leading == 2
    best = torch.einsum("bthd,bshd->bhs", q, k.expand(-1, -1, 3, -1)).topk(12).indices.sort(-1).values
    assert torch.equal(loki.choose(q, k).long(), best)
    # one dimension misses some
    assert not torch.equal(ap.Loki.fit(k, dims=1 / D, keep=keep).choose(q, k).long(), best)


def test_the_rotation_is_orthogonal_and_its_variances_fall() -> None:
    keys = torch.randn(2, 300, 3, 8) @ torch.randn(8, 8) + 5
    loki = ap.Loki.fit(keys)
    eye = torch.eye(8).expand(3, 8, 8)
    torch.testing.assert_close(loki.p.mT @ loki.p, eye, atol=1e-5, rtol=0)
    variances = loki.turn(keys).flatten(0, 1).var(0)
    assert (variances.diff(dim=-1) <= 1e-4).all()
    # covariances of different dimensions vanish
    x = loki.turn(keys).flatten(0, 1)
    x = x - x.mean(0)
    covariance = torch.einsum("nhd,nhe->hde", x, x) / 599
    torch.testing.assert_close(covariance, torch.diag_embed(variances), atol=1e-3, rtol=1e-3)
    # signs are fixed
    torch.testing.assert_close(ap.Loki.fit(keys.flip(1)).p, loki.p, atol=1e-5, rtol=1e-4)


def test_ties_go_to_the_lower_index() -> None:
    loki = ap.Loki(torch.eye(4).expand(1, 4, 4), dims=0.5, keep=0.1)
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 500, 1, 4)
    assert torch.equal(loki.choose(q, k)[0, 1], torch.arange(50, dtype=torch.int32))
    assert torch.equal(loki.choose(q, k, unit="page", page=10)[0, 0], torch.arange(5, dtype=torch.int32))


def test_a_page_is_chosen_by_its_share_of_the_groups_weights() -> None:
    """A page of one large key for one head wins over pages of keys that all heads see a little."""
    loki = ap.Loki(torch.eye(2).expand(1, 2, 2), dims=1.0, keep=0.25)
    k = torch.zeros(1, 16, 1, 2)
    k[0, 9, 0, 0] = 10.0
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[None, None]
    assert loki.choose(q, k, unit="page", page=4).tolist() == [[[2]]]
    # the scale of the scores is part of the weights, so a small one leaves ties
    assert loki.choose(q, k * 0, unit="page", page=4).tolist() == [[[0]]]


def test_the_last_page_may_be_short() -> None:
    q, k, v = inputs(18, 2, 1, 8, 8)
    loki = ap.Loki.fit(k, keep=0.3)
    for pages in ([0, 4], [1, 2]):
        chosen = torch.tensor(pages, dtype=torch.int32).expand(2, 1, 2)
        rows = [j for j in range(18) if j // 4 in pages]
        found = loki.attend(q, k, v, unit="page", page=4, chosen=chosen)
        torch.testing.assert_close(found, rt.attention(q, k[:, rows], v[:, rows]))


def test_nan_in_a_key_that_is_not_chosen_stays_there() -> None:
    q, k, v = inputs(16, 2, 1, 8, 8)
    loki = ap.Loki.fit(k)
    k[:, 5] = math.nan
    token = torch.arange(4, dtype=torch.int32).expand(2, 2, 4)
    assert loki.attend(q, k, v, chosen=token).isfinite().all()
    assert loki.attend(q, k, v, chosen=token, backend="eager").isfinite().all()
    assert loki.attend(q, k, v, chosen=token + 2).isnan().all()


def test_files_know_their_model(tmp_path) -> None:
    loki = ap.Loki.fit(torch.randn(20, 2, 8), dims=0.5, keep=0.125, model="small, layer 3", rotated=False)
    assert repr(loki) == "Loki(2 heads of 8, dims=0.5, keep=0.125, rotated=False, model='small, layer 3')"
    loki.save(tmp_path / "loki")
    found = ap.Loki.load(tmp_path / "loki", model="small, layer 3")
    assert torch.equal(found.p, loki.p)
    assert (found.dims, found.keep, found.rotated, found.model) == (0.5, 0.125, False, "small, layer 3")
    with pytest.raises(rt.InvalidInput, match="was fitted to model 'small, layer 3'; must be 'small, layer 4'"):
        ap.Loki.load(tmp_path / "loki", model="small, layer 4")
    with pytest.raises(rt.InvalidInput, match="cannot be read"):
        ap.Loki.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(rt.InvalidInput, match=r"is no file of Loki\.save"):
        ap.Loki.load(tmp_path / "text")
    torch.save({"p": loki.p}, tmp_path / "other")
    with pytest.raises(rt.InvalidInput, match="or one of another version"):
        ap.Loki.load(tmp_path / "other")


def test_bad_input_is_one_sentence() -> None:
    q, k, v = inputs(16, 2, 1, 8, 8)
    loki = ap.Loki.fit(k)
    cases = [
        (lambda: loki.attend(q.expand(-1, 2, -1, -1), k, v), "q has length 2; loki decodes one query per sequence"),
        (lambda: ap.Loki.fit(torch.randn(9, 2, 8)).attend(q, k, v), "this Loki has 2 heads of 8: it was fitted to another model"),
        (lambda: loki.attend(q, k, v, unit="word"), "unit is 'word'; must be 'token' or 'page'"),
        (lambda: loki.attend(q, k, v, page=0), "page is 0; must be an int of at least 1"),
        (lambda: loki.attend(q, k, v, page=12, unit="page"), "page is 12; must be a power of two"),
        (lambda: loki.attend(q, k, v, chosen=torch.full((2, 2, 3), 16)), "chosen has values from 16 to 16; must be from 0 to 15"),
        (lambda: loki.attend(q, k, v, chosen=torch.zeros(2, 3)), "must be an int32 tensor (B, heads, n) = (2, 2, n)"),
        (lambda: loki.attend(q, k, v, alibi=1), "has no argument alibi"),
        (lambda: ap.Loki(k[0, 0]), "p is a torch.float32 tensor (1, 8); must be a tensor (Hk, D, D)"),
        (lambda: ap.Loki(loki.p, 5), "dims is 5; must be a number above 0 and at most 1"),
        (lambda: loki.save("/no/such/folder/loki"), "/no/such/folder/loki cannot be written: "),
        (lambda: ap.Loki.fit(k, dims=0), "dims is 0; must be a number above 0 and at most 1"),
        (lambda: ap.Loki.fit(k, keep=1.5), "keep is 1.5; must be a number above 0 and at most 1"),
        (lambda: ap.Loki.fit(k[:1, :1]), "keys has 1 tokens; must have at least 2"),
        (lambda: ap.Loki.fit(k * math.nan), "keys has NaN or infinite values"),
        (lambda: ap.Loki.fit(3), "keys is 3; must be a floating-point tensor"),
        (lambda: loki.turn(k[..., :4]), "was it fitted to another model?"),
    ]
    for call, due in cases:
        with pytest.raises(rt.InvalidInput) as raised:
            call()
        assert due in str(raised.value)
