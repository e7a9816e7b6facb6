"""A call of every operator for 2:4 weights, with its work counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch

import rooftile as rt
from rooftile import sparsity
from rooftile.cost.counts import Work
from rooftile.weights.two_four.product import multiply_masked


def _two_four(device: torch.device) -> sparsity.TwoFour:
    w = torch.randn(4, 64, device=device)
    return sparsity.compress(w, sparsity.two_four(w))


def _two_four_mask(device: torch.device) -> Work:
    sparsity.two_four(torch.randn(4, 64, device=device), transposable=True)
    return Work(0, 4 * 256, 4 * 64)


def _two_four_compress(device: torch.device) -> Work:
    _two_four(device)
    # a byte for each place of the mask; half of the values, and half a byte for the places of four
    return Work(0, 4 * 256 + 4 * 64, 4 * 128 + 4 * 8)


def _two_four_dense(device: torch.device) -> Work:
    _two_four(device).dense()
    return Work(0, 4 * 128 + 4 * 8, 4 * 256)


def _linear_two_four(device: torch.device) -> Work:
    rt.linear(torch.randn(5, 64, device=device), _two_four(device), torch.randn(4, device=device))
    # half of the products
    return Work(2 * 5 * 32 * 4, 5 * 256 + 4 * (128 + 8) + 16, 5 * 16)


def _linear_masked(device: torch.device) -> Work:
    x, bias = torch.randn(5, 64, device=device), torch.randn(4, device=device)
    multiply_masked(x, _two_four(device).dense(), bias, transposable=True)
    return Work(2 * 5 * 32 * 4, 5 * 256 + 4 * 256 + 16, 5 * 16)


def _linear_masked_backward(device: torch.device) -> Work:
    x, w = torch.randn(5, 64, device=device, requires_grad=True), _two_four(device).dense().requires_grad_()
    multiply_masked(x, w, None, transposable=False).sum().backward()
    # half of the products for x, all of them for the weight
    return Work(3 * 5 * 64 * 4, 5 * 16 + 5 * 256 + 4 * 256, 5 * 256 + 4 * 256)


SPARSE_CALLS: dict[str, Callable[[torch.device], Work]] = {
    "two_four_mask": _two_four_mask,
    "two_four_compress": _two_four_compress,
    "two_four_dense": _two_four_dense,
    "linear_two_four": _linear_two_four,
    "linear_masked": _linear_masked,
    "linear_masked_backward": _linear_masked_backward,
}
