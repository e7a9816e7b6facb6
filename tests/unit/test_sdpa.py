"""The corrections of the sdpa backend around PyTorch's kernels. The cases run in tests/conformance."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.exact import dispatch, reference
from rooftile.exact.backends import sdpa
from rooftile.exact.backends.sdpa import stock
from rooftile.exact.masks import Mask
from rooftile.exact.spec import Spec
from tests.unit.poison import LENGTHS, assert_nan_only_where_seen


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "do"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [rt.FULL, rt.CAUSAL], ids=str)
def test_nan_shows_where_it_is_seen_and_nowhere_else(mask: Mask, lengths: tuple[int, int], poisoned: str) -> None:
    assert_nan_only_where_seen("sdpa", mask, *lengths, poisoned)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (1, 9), (9, 1), (9, 4), (4, 9)], ids=str)
@pytest.mark.parametrize("mask", [rt.FULL, rt.CAUSAL], ids=str)
def test_lengths_that_torch_gets_wrong(mask: Mask, lengths: tuple[int, int]) -> None:
    T, S = lengths
    q, k, v = torch.randn(2, T, 4, 8), torch.randn(2, S, 2, 8), torch.randn(2, S, 2, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    due, due_lse = reference.attention(*(x.double() for x in leaves), mask)
    with torch.no_grad():
        _, lse = rt.attention_with_lse(*leaves, mask, backend="sdpa")
    o = rt.attention(*leaves, mask, backend="sdpa")
    torch.testing.assert_close(o.double(), due, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), due_lse, rtol=0, atol=1e-5)
    do = torch.randn_like(o)
    for found, expected in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(due, leaves, do.double()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_last_axis_with_gaps_is_read_rightly() -> None:
    q, k, v = (torch.randn(1, 20, 2, 32)[..., ::2] for _ in range(3))
    due, _ = reference.attention(q, k, v, rt.CAUSAL)
    torch.testing.assert_close(rt.attention(q, k, v, rt.CAUSAL, backend="sdpa"), due)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_the_stock_kernel_runs_while_the_operator_is_overridden() -> None:
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    due = rt.attention(q, k, v, rt.CAUSAL, backend="sdpa")

    def override(*args: object, **kwargs: object) -> None:
        raise AssertionError("the operator was called, not the stock kernel")

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_flash_attention_for_cpu", override, "CPU")
        found = rt.attention(q, k, v, rt.CAUSAL, backend="sdpa")
        with pytest.raises(AssertionError, match="the operator was called"):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(found, due)
    assert stock.kernel(stock.CPU_FORWARD, "CPU") is stock.kernel(stock.CPU_FORWARD, "CPU")


def test_compiles_into_one_graph() -> None:
    q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rt.attention(q * 2, k, v, rt.CAUSAL, backend="sdpa").sin()

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    found, due = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, program))
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a, b)


def test_it_is_the_automatic_choice_on_the_cpu_where_it_is_exact() -> None:
    q = torch.randn(1, 16, 2, 8)
    assert "sdpa     runs it" in rt.explain(q, q, q, rt.CAUSAL)
    assert "tiled    runs it" in rt.explain(q, q, q, rt.CAUSAL & rt.Window(4))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"mask": rt.Window(3)}, "mask window(3, None); has full, causal"),
        ({"dim_v": 32}, "head dims 64 and 32; has equal ones"),
        ({"layout": "packed", "device": "sm90", "dtype": torch.bfloat16}, "layout 'packed'; has 'dense', and on a CPU 'packed'"),
        ({"layout": "packed"}, None),
        ({"softcap": 2.0}, "softcap; has none"),
        ({"has_bias": True}, "bias; has none"),
        ({"has_alibi": True}, "alibi; has none"),
        ({"has_sinks": True}, "sinks; has none"),
        ({"dropout": 0.1}, "dropout; has none"),
        ({"scale": -0.5}, "scale -0.5; has positive ones"),
        ({"needs_grad": True, "needs_lse": True}, "gradients through lse; has gradients through the output only"),
        ({"forward_mode": True}, "forward-mode or second derivatives; has gradients (use backend='eager')"),
        ({"deterministic": True}, "deterministic=True; its sums depend on the size of the batch"),
        ({"device": "sm75", "dtype": torch.float16}, "tensors are on sm75; has cpu, sm80 and newer"),
        ({"device": "sm90"}, "fp32; has fp16, bf16"),
        ({"device": "sm90", "dtype": torch.bfloat16, "dim": 20, "dim_v": 20}, "head dim 20; has multiples of 8 up to 256"),
        ({"device": "sm90", "dtype": torch.bfloat16, "mask": rt.CAUSAL},
         "mask causal; has full (what a causal mask hides may leak NaN)"),
        ({"device": "sm90", "dtype": torch.bfloat16}, None),
        ({"needs_lse": True}, None),
    ],
)  # fmt: skip
def test_refusals(what: dict, reason: str | None) -> None:
    spec = Spec(**{"dtype": torch.float32, "dim": 64, "dim_v": 64, "scale": 0.125} | what)
    assert list(sdpa.refusals(spec)) == ([reason] if reason else [])
    assert (dispatch.verdicts(spec)["sdpa"] == ()) == (reason is None)
