"""The Triton kernel for quantised tensors, interpreted: what the definition computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.masks import Mask
from tests.grids import swept
from tests.unit.test_precision import RECIPES, recipes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def inputs(T: int, S: int, H: int, Hk: int, dim: int, dim_v: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, T, H, dim), torch.randn(1, S, Hk, dim) + 2 * torch.randn(Hk, dim), torch.randn(1, S, Hk, dim_v)


def assert_same(found: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor]) -> None:
    # a weight on the border between two codes may fall on either side
    torch.testing.assert_close(found[0], due[0], rtol=0, atol=5e-3, equal_nan=True)
    apart = (found[0] - due[0]).abs().nan_to_num(nan=0.0)
    assert apart.median() < 1e-5
    torch.testing.assert_close(found[1], due[1], rtol=1e-5, atol=1e-4, equal_nan=True)


MASKS = [rt.FULL, rt.CAUSAL, rt.CAUSAL & rt.Window(30), rt.Prefix(20), rt.Chunk(50)]
GRID = [(name, mask) for mask in MASKS for name in RECIPES]


# each recipe, and each mask with FP8 and with INT8
@pytest.mark.parametrize(("name", "mask"), swept(GRID, lambda case: (case[0], (case[1], RECIPES[case[0]].qk))), ids=str)
def test_it_is_the_definition(name: str, mask: Mask) -> None:
    precision = RECIPES[name]
    q, k, v = inputs(70, 150, 4, 2, 32, 16)
    call = (q, k, v, mask)
    assert_same(
        rt.attention_with_lse(*call, precision=precision, backend="triton"),
        rt.attention_with_lse(*call, precision=precision, backend="eager"),
    )


@pytest.mark.parametrize("options", [{"softcap": 4.0}, {"sinks": torch.tensor([1.0, -1.0])}, {"scale": 0.5}], ids=str)
def test_options(options) -> None:
    q, k, v = inputs(20, 140, 2, 1, 48, 48)
    for precision in ("fp8", "int8"):
        call = {"precision": precision, **options}
        found = rt.attention_with_lse(q, k, v, rt.CAUSAL, backend="triton", **call)
        assert_same(found, rt.attention_with_lse(q, k, v, rt.CAUSAL, backend="eager", **call))


@pytest.mark.parametrize("name", ["fp8", "int8", "per row"])
def test_packed(name: str) -> None:
    lengths = [(30, 130), (1, 5), (0, 7), (140, 140)]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True))
    q, k, v = (x[0] for x in inputs(int(cu_q[-1]), int(cu_k[-1]), 2, 1, 16, 16))
    call = (q, k, v, cu_q, cu_k, rt.CAUSAL)
    assert_same(
        rt.attention_packed_with_lse(*call, precision=RECIPES[name], backend="triton"),
        rt.attention_packed_with_lse(*call, precision=RECIPES[name], backend="eager"),
    )


@recipes
def test_a_nan_stays_where_it_is_seen(precision: rt.Precision) -> None:
    q, k, v = inputs(140, 140, 2, 1, 32, 32)
    q[0, 3, 1, 5] = torch.nan
    k[0, 100, 0, 0] = torch.inf
    v[0, 80, 0, 7] = -torch.inf
    call = (q, k, v, rt.CAUSAL)
    found = rt.attention_with_lse(*call, precision=precision, backend="triton")
    due = rt.attention_with_lse(*call, precision=precision, backend="eager")
    assert torch.equal(found[0].isnan(), due[0].isnan())
    assert torch.equal(found[1].isnan(), due[1].isnan())
    assert not found[0][0, :80, 0].isnan().any()


def test_rows_that_see_nothing_and_no_keys() -> None:
    q, k, v = inputs(20, 10, 2, 2, 16, 16)
    o, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, precision="int8", backend="triton")
    assert not o[:, :10].any()
    assert (lse[:, :, :10] == -torch.inf).all()
    o, lse = rt.attention_with_lse(q, k[:, :0], v[:, :0], precision="fp8", backend="triton")
    assert not o.any()
    assert (lse == -torch.inf).all()


def test_what_it_made_it_attends_to() -> None:
    q, k, v = inputs(20, 30, 2, 2, 16, 16)
    qkv = rt.quantise_qkv(q, k, v, "int8")
    assert qkv.v_order == "rows"
    found = rt.attention_quantised(qkv, rt.CAUSAL, backend="triton")
    assert torch.equal(found, rt.attention(q, k, v, rt.CAUSAL, precision="int8"))
