"""Recurrences under autocast, inference_mode, torch.func and torch.compile, and their refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftile import recurrent as rec
from rooftile.errors import InvalidInput, Unsupported
from tests.recurrent.cases import KINDS
from tests.recurrent.test_recurrences import STEPS, call, close, flat, with_gradients

kinds = pytest.mark.parametrize("kind", list(KINDS))


@kinds
def test_compiled_programs_are_one_graph_with_the_same_gradients(kind: str) -> None:
    torch.manual_seed(0)
    case = KINDS[kind](40)
    torch._dynamo.reset()
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    due = with_gradients(case, flat(case))
    compiled_case = type(case)(compiled, case.defined, case.tensors, case.given, case.options, case.state)
    close(with_gradients(compiled_case, flat(case)), due, 1e-12)


@kinds
def test_compiled_steps(kind: str) -> None:
    torch.manual_seed(1)
    case = KINDS[kind](1)
    step = STEPS.get(kind, rec.gated_delta_step)
    tensors = flat(case)
    one = {name: x[:, 0] if x.ndim > 1 and x.shape[:2] == (2, 1) else x for name, x in tensors.items()}
    first, given = [one[n] for n in case.tensors], {n: one[n] for n in case.given if n != case.state}
    memories = [torch.zeros(4, *tensors[case.state].shape[1:], dtype=torch.float64) for _ in range(2)]
    slots = torch.tensor([3, 1])
    torch._dynamo.reset()
    due = step(memories[0], *first, slots=slots, **given)
    with torch.no_grad():
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(memories[1], *first, slots=slots, **given)
    assert torch.equal(found, due)
    assert torch.equal(*memories)


@kinds
def test_inference_mode_and_meta_tensors(kind: str) -> None:
    torch.manual_seed(2)
    case = KINDS[kind](20)
    due = call(case, flat(case))
    with torch.inference_mode():
        close(call(case, flat(case)), due, 1e-14)
    with torch.device("meta"):
        shapes = call(case, {name: torch.empty_like(x, device="meta") for name, x in flat(case).items()})
    assert [x.shape for x in shapes] == [x.shape for x in due]


@kinds
def test_transforms_of_torch_func(kind: str) -> None:
    torch.manual_seed(3)
    case = KINDS[kind](20)
    tensors = flat(case)
    names = list(tensors)

    def loss(*given: Tensor) -> Tensor:
        y, state = call(case, dict(zip(names, given, strict=True)))
        return y.sin().sum() + state.cos().sum()

    every = tuple(range(len(names)))
    found = torch.func.grad(loss, every)(*tensors.values())
    leaves = [x.clone().requires_grad_() for x in tensors.values()]
    close(found, torch.autograd.grad(loss(*leaves), leaves), 1e-10)
    # a batch of whole problems
    axes = tuple(0 for _ in names)
    stacked = [torch.stack((x, 0.9 * x)) for x in tensors.values()]
    mapped = torch.vmap(lambda *given: call(case, dict(zip(names, given, strict=True))), axes)(*stacked)
    for n in range(2):
        close([x[n] for x in mapped], call(case, dict(zip(names, (x[n] for x in stacked), strict=True))), 1e-10)


@kinds
def test_autocast_narrows_what_is_multiplied(kind: str) -> None:
    torch.manual_seed(4)
    case = KINDS[kind](20)
    tensors = {name: x.float() for name, x in flat(case).items()}
    if kind == "conv":
        tensors["tail"] = tensors["tail"].bfloat16()
    due = call(case, tensors if kind != "conv" else tensors | {"x": tensors["x"].bfloat16()})
    with torch.autocast("cpu", torch.bfloat16):
        y, state = call(case, tensors)
    assert y.dtype == torch.bfloat16
    assert state.dtype == (torch.bfloat16 if kind == "conv" else torch.float32)
    assert (y.float() - due[0].float()).abs().max() < 0.05 * due[0].abs().max()


def good() -> dict[str, Any]:
    return {name: x.float() for name, x in KINDS["ssd"](6).tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"A": torch.ones(4)}, "A has 1; must be at most 0"),
        ({"B": torch.rand(2, 6, 3, 6), "C": torch.rand(2, 6, 3, 6)}, "H is 4 and G is 3; H must be a multiple of G"),
        ({"C": torch.rand(2, 6, 2, 5)}, r"C is \(2, 6, 2, 5\), so N is 5; N must be 6, as in B"),
        ({"dt": torch.rand(2, 5, 4)}, r"dt is \(2, 5, 4\), so T is 5; T must be 6, as in x"),
        ({"x": torch.rand(2, 6, 4)}, r"x is \(2, 6, 4\); must have 4 axes \(B, T, H, P\)"),
        ({"B": torch.rand(2, 6, 2, 6).half()}, "B is torch.float16; must be torch.float32"),
        ({"x": torch.ones(2, 6, 4, 5).long()}, "x is torch.int64; must be float32, bfloat16, float16 or float64"),
        (
            {"state": torch.rand(2, 4, 6, 5)},
            r"state is torch.float32 \(2, 4, 6, 5\) on cpu; must be torch.float32 \(2, 4, 5, 6\)",
        ),
        ({"state": torch.rand(2, 4, 5, 6).bfloat16()}, "state is torch.bfloat16"),
        ({"dt": -torch.rand(2, 6, 4), "softplus": False}, "dt has -.*; must be at least 0"),
        ({"dt_limit": (0.5, 0.1)}, r"dt_limit is \(0.5, 0.1\); must be two numbers from 0 on"),
        ({"dt_limit": 3}, "dt_limit is 3; must be two numbers"),
        ({"softplus": 1}, "softplus is 1; must be True or False"),
        ({"backend": "cuda"}, "backend is 'cuda'; must be 'auto', 'triton', 'tiled' or 'eager'"),
        ({"cu": torch.tensor([0, 6])}, r"x is \(2, 6, 4, 5\); must have 3 axes \(total, H, P\)"),
        ({"D": [1.0]}, r"D is \[1.0\]; must be a tensor \(H\)"),
        ({"window": 3}, "window"),
        ({"softcap": 3.0}, "softcap"),
    ],
)
def test_refusals_of_ssd(change: dict[str, Any], words: str) -> None:
    given = good() | change
    with pytest.raises(InvalidInput, match=words):
        rec.ssd(*[given.pop(name) for name in ("x", "dt", "A", "B", "C")], **given)


@pytest.mark.parametrize(
    ("cu", "words"),
    [
        (torch.tensor([0, 4, 3, 6]), "cu falls somewhere"), (torch.tensor([1, 6]), "cu starts at 1; must start at 0"),
        (torch.tensor([0, 5]), "cu ends at 5; must end at 6"), (torch.tensor([0.0, 6.0]), "cu is torch.float32"),
        ([0, 6], r"cu is \[0, 6\]"),
    ],
)  # fmt: skip
def test_refusals_of_offsets(cu: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        rec.causal_conv(torch.rand(6, 3), torch.rand(3, 4), cu=cu)


def test_refusals_of_the_others() -> None:
    x, weight = torch.rand(2, 6, 3), torch.rand(3, 4)
    for words, run in {
        "activation is 'relu'; must be 'silu' or None": lambda: rec.causal_conv(x, weight, activation="relu"),
        "W is 3; W must be 5|so W is": lambda: rec.causal_conv(x, torch.rand(5, 4)),
        r"tail is torch.float32 \(2, 3, 4\)": lambda: rec.causal_conv(x, weight, tail=torch.rand(2, 3, 4)),
        r"tail is a torch.float32 tensor \(2, 3, 4\); must be \(rows, 3, 3\)": lambda: rec.conv_step(
            torch.rand(2, 3, 4), x[:, 0], weight
        ),
        "slots is torch.float32; must be int32 or int64": lambda: rec.conv_step(
            torch.rand(2, 3, 3), x[:, 0], weight, slots=torch.rand(2)
        ),
        "A has 0.5; must be at most 0": lambda: rec.selective_scan(x, x, torch.full((3, 2), 0.5), x[..., :2], x[..., :2]),
        "Hv is 4 and Hk is 3; Hv must be a multiple of Hk": lambda: rec.gated_delta(
            torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4), torch.rand(1, 2, 4)
        ),
        "scale is inf; must be a finite number": lambda: rec.gated_delta(
            *(torch.rand(1, 2, 3, 4) for _ in range(3)), torch.rand(1, 2, 3), torch.rand(1, 2, 3), scale=math.inf
        ),
    }.items():
        with pytest.raises(InvalidInput, match=words):
            run()


def test_numbers_of_numpy() -> None:
    q, k, v = (torch.rand(1, 5, 2, 4) for _ in range(3))
    g, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    due, _ = rec.gated_delta(q, k, v, g, beta, scale=0.5)
    found, _ = rec.gated_delta(q, k, v, g, beta, scale=np.float32(0.5))
    assert torch.equal(found, due)
    given = good()
    assert rec.ssd(*given.values(), dt_limit=(np.float64(0.0), np.float64(9.0)))[0].isfinite().all()


def test_a_step_has_no_gradient_and_needs_memory_of_its_own() -> None:
    torch.manual_seed(6)
    x, dt, A, (B, C) = torch.randn(2, 4, 8), torch.rand(2, 4), -torch.rand(4), torch.randn(2, 2, 1, 6)
    state = torch.zeros(2, 4, 8, 6)
    y = rec.ssd_step(state, x.clone().requires_grad_(), dt, A.requires_grad_(), B, C)
    assert not y.requires_grad
    assert not state.requires_grad
    assert state.any()
    with pytest.raises(
        Unsupported, match=r"a step of ssd under torch\.func: it changes states in place and has no gradient; write ssd"
    ):
        torch.func.grad(lambda x: rec.ssd_step(state, x, dt, A, B, C).sum())(x)
    with pytest.raises(Unsupported, match=r"a step of causal_conv under torch\.func"):
        torch.vmap(lambda x: rec.conv_step(torch.zeros(2, 8, 3), x, torch.ones(8, 4)))(torch.randn(3, 2, 8))
    with pytest.raises(InvalidInput, match=r"state is expanded, strides .*; must have memory for each number, .*: clone it"):
        rec.ssd_step(state[:1].expand(2, -1, -1, -1), x, dt, A, B, C)
