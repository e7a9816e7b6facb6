"""Rows out of a padded batch and back: values, both derivatives, transforms and a compiler."""

from __future__ import annotations

import pytest
import torch

from rooftile.exact.ops.unpad import put_rows, take_rows

ROWS = torch.tensor([4, 0, 3])


def test_rows_are_those_of_indexing_and_putting_is_its_transpose() -> None:
    x, y = torch.randn(6, 2, 3), torch.randn(3, 2, 3)
    assert torch.equal(take_rows(x, ROWS), x[ROWS])
    back = put_rows(y, ROWS, 6)
    assert torch.equal(back[ROWS], y)
    assert torch.equal(back[[1, 2, 5]], torch.zeros(3, 2, 3))
    torch.testing.assert_close((take_rows(x, ROWS) * y).sum(), (x * back).sum())


# PyTorch's own remark when it loads its rules for forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_derivatives_of_first_and_second_order_and_forward_mode() -> None:
    x, y = (torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (6, 3))

    def take(x: torch.Tensor) -> torch.Tensor:
        return take_rows(x, ROWS).square()

    def put(y: torch.Tensor) -> torch.Tensor:
        return put_rows(y, ROWS, 6).square()

    for function, at in ((take, x), (put, y)):
        assert torch.autograd.gradcheck(function, at, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, at)


def test_transforms_and_a_compiler_see_through() -> None:
    x = torch.randn(4, 6, 2)
    assert torch.equal(torch.func.vmap(take_rows, in_dims=(0, None))(x, ROWS), x[:, ROWS])
    grads = torch.func.grad(lambda x: take_rows(x, ROWS).square().sum())(x[0])
    assert torch.equal(grads, put_rows(2 * x[0, ROWS], ROWS, 6))

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return put_rows(take_rows(x, ROWS), ROWS, x.shape[0])

    x = torch.randn(6, 2, requires_grad=True)
    y = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, round_trip(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, put_rows(torch.ones(3, 2), ROWS, 6))
