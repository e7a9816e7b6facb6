"""SDPA's cuDNN operators on Rooftile. They exist on CUDA alone: here they are registered for CPU tensors."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import rooftile
from rooftile.integrations import torch_sdpa
from rooftile.integrations.torch_sdpa import OPERATORS, dense

CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
FORWARD, BACKWARD = (f"_scaled_dot_product_cudnn_attention{end}" for end in ("", "_backward"))


class StockKernelRan(Exception):
    pass


@pytest.fixture
def on_cpu(calls: Counter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Enables Rooftile with cuDNN's operators for CPU tensors; counts runs. PyTorch's own kernel says that it ran."""
    own = torch_sdpa.stock.kernel

    def stock(name: str, key: str) -> Any:
        if "cudnn" not in name:
            return own(name, key)

        def ran(*args: Any, **kwargs: Any) -> None:
            raise StockKernelRan

        return ran

    monkeypatch.setattr(torch_sdpa.stock, "kernel", stock)
    cudnn = {FORWARD: dense.cudnn_forward, BACKWARD: dense.cudnn_backward}
    monkeypatch.setitem(OPERATORS, "CPU", OPERATORS["CPU"] | cudnn)
    rooftile.enable()
    yield calls
    rooftile.disable()


def tensors(T: int = 24, S: int | None = None, H: int = 4, Hk: int = 4, D: int = 16, Dv: int = 16) -> list[Tensor]:
    shapes = ((2, H, T, D), (2, Hk, S or T, D), (2, Hk, S or T, Dv))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", [name for group in OPERATORS.values() for name in group])
def test_an_override_has_the_arguments_of_the_operator(name: str) -> None:
    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    override = next(group[name] for group in OPERATORS.values() if name in group)
    schema = getattr(torch.ops.aten, name).default._schema
    parameters = inspect.signature(override).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        pytest.skip("it hands its arguments on to the operator that is not in place")
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert len(places) == sum(not a.kwarg_only for a in schema.arguments)
    more = [a.name for a in schema.arguments if a.kwarg_only]
    assert set(own) <= set(more)
    assert own == more or any(p.kind is p.VAR_KEYWORD for p in parameters)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({"S": 45}, {"is_causal": True, "scale": 0.3}),
        ({"T": 45, "S": 20}, {}),
        ({"H": 6, "Hk": 2}, {"is_causal": True}),
        ({"D": 24, "Dv": 8}, {"is_causal": True}),
        ({"T": 1, "S": 17}, {}),
    ],
    ids=str,
)
def test_answers_and_gradients(on_cpu: Counter, sizes: dict[str, int], options: dict[str, Any]) -> None:
    q, k, v = tensors(**sizes)
    with sdpa_kernel(SDPBackend.MATH):
        wide = [x.double() for x in (q, k, v)]
        due = F.scaled_dot_product_attention(*wide, enable_gqa=True, **options)
    do = torch.randn_like(due)
    o, lse, *_ = CUDNN(q, k, v, None, True, **options)
    assert lse.shape == (*q.shape[:3], 1)
    torch.testing.assert_close(o, due.float(), atol=1e-5, rtol=1e-4)
    grads = torch.autograd.grad(o, (q, k, v), do.float())
    for x, y in zip(grads, torch.autograd.grad(due, (q, k, v), do), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
    assert on_cpu == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "qkv in one", "narrow values"])
def test_results_are_laid_out_as_the_fake_says(on_cpu: Counter, layout: str) -> None:
    """Inductor asserts the strides of the fake; an eager run does not check them."""
    x = torch.randn(2, 24, 3, 4, 16)
    q, k, v = {
        "contiguous": [torch.randn(2, 4, 24, 16) for _ in range(3)],
        "transposed": [torch.randn(2, 24, 4, 16).transpose(1, 2) for _ in range(3)],
        "qkv in one": [x[:, :, n].transpose(1, 2) for n in range(3)],
        "narrow values": [torch.randn(2, 24, 4, D).transpose(1, 2) for D in (16, 16, 8)],
    }[layout]

    def described(q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        found = CUDNN(q, k, v, None, True, 0.0, True)
        o, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = found
        operands = (q, k, v, o, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, True)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(torch.empty_like(o), *operands)
        return [(y.shape, y.stride(), y.dtype) if isinstance(y, Tensor) else y for y in (*found, *grads)]

    with torch._subclasses.FakeTensorMode() as mode:
        due = described(*(mode.from_tensor(y) for y in (q, k, v)))
    assert described(q, k, v) == due


@pytest.mark.parametrize(
    ("sizes", "arguments", "reason"),
    [
        ({}, (torch.zeros(24, 24), False), "attn_mask"),
        ({}, (None, False, 0.3), "dropout"),
        ({}, (None, False, 0.0, False, True), "a debug mask"),
        ({"T": 45, "S": 20}, (None, False, 0.0, True), "is_causal with more queries than keys"),
    ],
    ids=["attn_mask", "dropout", "debug mask", "more queries"],
)
def test_what_is_refused_runs_the_kernel_that_pytorch_picked(
    on_cpu: Counter, sizes: dict[str, int], arguments: tuple[Any, ...], reason: str
) -> None:
    q, k, v = (x.detach() for x in tensors(**sizes))
    before = rooftile.status().refused.get(reason, 0)
    with pytest.raises(StockKernelRan):
        CUDNN(q, k, v, *arguments)
    assert rooftile.status().refused[reason] == before + 1
    assert not on_cpu
    # and so does the backward of a call that was refused
    dropout, is_causal = (*arguments, 0.0, False, False)[2:4] if len(arguments) > 2 else (0.0, False)
    if reason != "a debug mask":
        lse, state = q.new_zeros((*q.shape[:3], 1)), torch.zeros((), dtype=torch.int64)
        with pytest.raises(StockKernelRan):
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                q, q, k, v, q, lse, state, state, arguments[0], None, None, 1, 1, dropout, is_causal
            )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_in_a_compiled_graph(on_cpu: Counter) -> None:
    q, k, v = tensors()
    with sdpa_kernel(SDPBackend.MATH):
        due = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    do = torch.randn_like(due)

    @torch.compile(fullgraph=True)
    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * CUDNN(q, k, v, None, True, 0.0, True)[0]

    o = doubled(q, k, v)
    torch.testing.assert_close(o / 2, due.float(), atol=1e-5, rtol=1e-4)
    found = torch.autograd.grad(o, (q, k, v), do.float() / 2)
    for x, y in zip(found, torch.autograd.grad(due, (q, k, v), do), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
    assert on_cpu == {"forward": 1, "backward": 1}


def test_enabling_leaves_pytorchs_order_of_kernels_alone(calls: Counter) -> None:
    def order() -> list[Any]:
        cuda = torch.backends.cuda
        on = (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
        return [*on, torch._C._get_sdp_priority_order()]

    before = order()
    rooftile.enable()
    assert order() == before
    rooftile.disable()
    assert order() == before


def test_a_cuda_build_gets_every_operator_and_loses_it_again(calls: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this build has kernels for CUDA")
    asked = []
    own = torch_sdpa.stock.kernel
    monkeypatch.setattr(torch_sdpa.stock, "kernel", lambda name, key: own(name, key) if key == "CPU" else asked.append(name))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    def there(name: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")

    names = [name for name in OPERATORS["CUDA"] if hasattr(torch.ops.aten, name)]
    assert FORWARD in names and BACKWARD in names  # noqa: PT018
    assert not any(map(there, names))
    rooftile.enable()
    assert all(map(there, names))
    # each was looked up before it was overridden
    assert asked == [f"aten::{name}" for name in names]
    rooftile.disable()
    assert not any(map(there, names))
