"""The signed Hadamard transform, and fake quantisation."""

from __future__ import annotations

import pytest
import torch

from rooftile.numerics import fake_quantise, hadamard, inverse_hadamard, quantise, signs_of


def matrix(n: int) -> torch.Tensor:
    """Builds Sylvester's matrix by its definition."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


@pytest.mark.parametrize("D", [16, 64, 96, 128, 192, 256, 512, 1040])
def test_it_is_the_matrix_product(D: int) -> None:
    x = torch.randn(7, D, dtype=torch.float64)
    pieces = {96: [64, 32], 192: [128, 64], 1040: [512, 512, 16]}.get(D, [D])
    due = (x * signs_of(D)) @ torch.block_diag(*(matrix(n) for n in pieces))
    torch.testing.assert_close(hadamard(x).double(), due, rtol=0, atol=1e-5)
    torch.testing.assert_close(inverse_hadamard(hadamard(x)).double(), x, rtol=0, atol=1e-5)


def test_products_stay_and_outliers_spread() -> None:
    q, k = torch.randn(2, 50, 128)
    q[3, 7] = 100.0
    torch.testing.assert_close(hadamard(q) @ hadamard(k).mT, q @ k.mT, rtol=0, atol=2e-4)
    assert hadamard(q)[3].abs().max() < 20
    # equal numbers would become one spike without signs
    flat = torch.ones(1, 128)
    assert hadamard(flat, torch.ones(128)).abs().max() > 11
    assert hadamard(flat).abs().max() < 4


def test_signs_are_fixed_and_about_even() -> None:
    assert torch.equal(signs_of(128), signs_of(128))
    assert not torch.equal(signs_of(128), signs_of(128, seed=1))
    for D in (64, 128, 256):
        assert abs(signs_of(D).sum()) < 3 * D**0.5
    assert signs_of(8).tolist() == signs_of(16)[:8].tolist()


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_fake_quantisation_rounds_and_lets_gradients_through(format: str) -> None:
    x = torch.randn(1, 200, 2, 16, requires_grad=True)
    y = fake_quantise(x, format, granularity="block")
    assert torch.equal(y, quantise(x.detach(), format, granularity="block").dequantise())
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(x.grad, dy)


def test_own_scales_saturate_and_stop_gradients_there() -> None:
    x = torch.tensor([0.2, -3.0, 1.27, 1.28, -1.27, -1.3, 0.006]).reshape(-1, 1, 1).requires_grad_()
    y = fake_quantise(x, "int8", scales=torch.full((1, 1, 1), 0.01))
    due = torch.tensor([0.2, -1.27, 1.27, 1.27, -1.27, -1.27, 0.01])
    torch.testing.assert_close(y.detach().flatten(), due, rtol=0, atol=1e-6)
    y.sum().backward()
    assert x.grad.flatten().tolist() == [1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_scales_of_quantise_round_as_quantise_does(format: str) -> None:
    x = torch.randn(300, 2, 64)
    made = quantise(x, format, granularity="row")
    assert torch.equal(fake_quantise(x, format, granularity="row", scales=made.scales), made.dequantise())


def test_what_is_representable_comes_back_and_the_dtype_stays() -> None:
    x = quantise(torch.randn(1, 5, 2, 16), "int4", granularity="row").dequantise().requires_grad_()
    torch.testing.assert_close(fake_quantise(x, "int4", granularity="row"), x, rtol=1e-6, atol=0)
    assert fake_quantise(x.bfloat16(), "fp8_e4m3").dtype == torch.bfloat16


def test_what_inference_made_first_has_gradients_later() -> None:
    signs_of.cache_clear()
    with torch.inference_mode():
        hadamard(torch.randn(3, 48))
    x = torch.randn(3, 48, requires_grad=True)
    inverse_hadamard(hadamard(x)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))
