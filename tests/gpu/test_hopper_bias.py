"""A bias on Hopper: forward, backward and its gradient, broadcast and not, beyond the conformance suite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.backends.hopper import DIMS_BIAS
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

MASKS = [FULL, CAUSAL, Window(100, 7), Prefix(70) & Window(500), Chunk(90)]
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def run(backend: str, q, k, v, bias, mask: Mask, do, dlse, **options) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    o, lse = rt.attention_with_lse(*leaves[:3], mask, bias=leaves[3], backend=backend, **options)
    finite = lse.isfinite()
    return o, lse, *torch.autograd.grad([o, lse[finite]], leaves, [do, dlse[finite]])


def assert_as_defined(q, k, v, bias, mask: Mask, **options) -> None:
    """At most twice as wrong as plain attention in the same dtypes, plus rounding."""
    do = torch.randn_like(q)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    found = run("hopper", q, k, v, bias, mask, do, dlse, **options)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    exact = run("eager", *(x.double() for x in (q, k, v, bias)), mask, do.double(), dlse.double(), **wide)
    plain = run("eager", q, k, v, bias, mask, do, dlse, **options)
    for name, x, near, far in zip(NAMES, found, exact, plain, strict=True):
        finite = near.isfinite()
        assert (x.isfinite() == finite).all(), name
        x, near, far = (y[finite].double() for y in (x, near, far))
        assert (x - near).abs().max() <= 2 * (far - near).abs().max() + 8 * torch.finfo(q.dtype).eps * near.abs().max(), name


def poison() -> None:
    """Leaves NaN in the memory that the next calls are given."""
    del_me = torch.full((2**27,), float("nan"), device="cuda")
    del del_me


@pytest.mark.parametrize(("dim", "dim_v"), DIMS_BIAS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("dtype", "bias_dtype"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")])
def test_ragged_lengths(dim: int, dim_v: int, mask: Mask, dtype: str, bias_dtype: str) -> None:
    for T, S in ((1, 300), (257, 257), (640, 333), (328, 1160)):
        q, k, v = (randn(2, n, h, d, dtype=getattr(torch, dtype)) for n, h, d in ((T, 4, dim), (S, 2, dim), (S, 2, dim_v)))
        bias = randn(2, 4, T, S, dtype=getattr(torch, bias_dtype))
        poison()
        assert_as_defined(q, k, v, bias, mask)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("axes", ["HTS", "BTS", "TS", "BS", "S", "BHT", "H", "BHS", ""])
@pytest.mark.parametrize("S", [320, 333])
def test_broadcast(dim: int, mask: Mask, axes: str, S: int) -> None:
    """Whatever is broadcast, also as a view of strides 0, with lines of 16 bytes and without."""
    sizes = {"B": 3, "H": 4, "T": 270, "S": S}
    q, k, v = randn(3, 270, 4, dim), randn(3, S, 2, dim), randn(3, S, 2, dim)
    bias = randn(*(n if axis in axes else 1 for axis, n in sizes.items()))
    assert_as_defined(q, k, v, bias, mask)
    given = rt.attention(q, k, v, mask, bias=bias, backend="hopper")
    assert torch.equal(rt.attention(q, k, v, mask, bias=bias.expand(tuple(sizes.values())), backend="hopper"), given)


@pytest.mark.parametrize("dim", [64, 128])
def test_strides_of_a_slice(dim: int) -> None:
    q, k, v = (randn(2, 200, 4, dim) for _ in range(3))
    whole = randn(2, 200, 4, 512)
    for bias in (whole.transpose(1, 2)[..., :200], whole.transpose(1, 2)[..., 3:203], whole[..., :200].permute(0, 2, 3, 1)):
        assert_as_defined(q, k, v, bias, CAUSAL)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_rows_that_the_bias_hides(dim: int, mask: Mask) -> None:
    """Rows of -inf give zeros; with sinks the sink has all the weight."""
    q, k, v = (randn(2, 300, 2, dim) for _ in range(3))
    bias = randn(1, 2, 300, 300, dtype=torch.float32)
    bias[:, :, 100:200] = float("-inf")
    bias[..., 250:] = float("-inf")
    for options in ({}, {"sinks": torch.randn(2, device="cuda")}):
        assert_as_defined(q, k, v, bias, mask, **options)
    seen = torch.rand(2, 1, 1, 300, device="cuda") < 0.7
    o = rt.attention(q, k, v, mask, bias=seen, backend="hopper")
    exact = rt.attention(*(x.double() for x in (q, k, v)), mask, bias=seen, backend="eager")
    assert (o.double() - exact).abs().max() < 0.03


@pytest.mark.parametrize("dim", [64, 128])
def test_a_nan_behind_the_mask_stays_there(dim: int) -> None:
    q, k, v = (randn(1, 300, 2, dim) for _ in range(3))
    bias, do = randn(1, 2, 300, 300), randn(1, 300, 2, dim)
    dlse = torch.randn(1, 2, 300, device="cuda")
    due = run("hopper", q, k, v, bias, CAUSAL, do, dlse)
    k[:, 200], v[:, 201], bias[..., 202] = (float("nan"),) * 3
    found = run("hopper", q, k, v, bias, CAUSAL, do, dlse)
    for name, x, y in zip(("o", "lse", "dq"), (found[0][:, :200], found[1][..., :200], found[2][:, :200]),
                          (due[0][:, :200], due[1][..., :200], due[2][:, :200]), strict=True):  # fmt: skip
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02, msg=name)


@pytest.mark.parametrize("dim", [64, 128])
def test_repeated_calls_and_large_scores(dim: int) -> None:
    q, k, v = (randn(2, 1024, 4, dim) for _ in range(3))
    bias = randn(1, 4, 1024, 1024, dtype=torch.float32) * 30
    first = rt.attention(q, k, v, bias=bias, backend="hopper")
    for _ in range(10):
        assert torch.equal(rt.attention(q, k, v, bias=bias, backend="hopper"), first)
    assert_as_defined(q, k, v, bias, FULL)


def test_what_has_no_bias_here_says_so() -> None:
    q, k, v = (randn(1, 64, 2, 64) for _ in range(3))
    for options in ({"softcap": 5.0}, {"deterministic": True}):
        with pytest.raises(rt.Unsupported, match="bias"):
            rt.attention(q.requires_grad_(), k, v, bias=randn(1, 2, 64, 64), backend="hopper", **options)
        o = rt.attention(q, k, v, bias=randn(1, 2, 64, 64), **options)
        assert o.isfinite().all()
