"""The product of one row, interpreted: against fp64, and where PyTorch's product stays."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn import functional

from rooftile.fused import one_row
from rooftile.fused.kernels import one_row as kernels


# widths of one number, of less than a step, of whole steps, of a step that is not full
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (5, 3), (9, 256), (4, 700), (33, 1408), (7, 2560)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_equals_fp64(out: int, inner: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(1, inner).to(dtype), (torch.randn(out, inner) / inner**0.5).to(dtype)
    bias = torch.randn(out).to(dtype) if with_bias else None
    with mock.patch.object(kernels, "product", wraps=kernels.product) as seen:
        y = one_row.project(x, weight, bias)
    assert seen.called
    due = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # the sum is rounded once
    torch.testing.assert_close(y, due.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_strides_of_a_row_do_not_matter() -> None:
    x, weight = torch.randn(40, 2).bfloat16().T[:1], torch.randn(6, 40).bfloat16()
    assert torch.equal(one_row.project(x, weight), one_row.project(x.contiguous(), weight))


def test_other_products_are_pytorchs() -> None:
    x, weight = torch.randn(1, 40).bfloat16(), torch.randn(6, 40).bfloat16()
    with mock.patch.object(kernels, "product", side_effect=AssertionError):
        assert one_row.project(x.expand(2, 40), weight).shape == (2, 6)
        assert one_row.project(x.float(), weight.float()).dtype == torch.float32
        assert one_row.project(x, weight.clone().requires_grad_()).requires_grad
        assert one_row.project(x, weight.T.contiguous().T).shape == (1, 6)
        assert one_row.project(x[:, :0], weight[:, :0]).shape == (1, 6)
        assert one_row.project(torch.zeros(1, 40_000).bfloat16(), torch.zeros(2, 40_000).bfloat16()).shape == (1, 2)
        assert torch.func.vmap(lambda row: one_row.project(row[None], weight))(x).shape == (1, 1, 6)
        assert one_row.project(x.to("meta"), weight.to("meta")).shape == (1, 6)
