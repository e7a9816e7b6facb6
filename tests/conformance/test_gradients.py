"""Derivatives: the definition against finite differences, formulas against autograd, twice, forward, and of merge."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import rooftile as rt
from rooftile.exact import dispatch, reference
from rooftile.exact.cases import CASES, Case, tagged
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window
from rooftile.runtime.devices import arch

# torch's forward mode uses deprecated parts of torch
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

# name: T, S, H, Hk, mask, options
SMALL: dict[str, tuple[int, int, int, int, Mask, tuple[str, ...]]] = {
    "full": (3, 4, 2, 2, FULL, ()),
    "causal": (4, 4, 2, 1, CAUSAL, ()),
    "causal-more-queries": (5, 3, 1, 1, CAUSAL, ()),
    "window": (4, 5, 2, 1, Window(1, 1), ()),
    "prefix": (4, 4, 1, 1, Prefix(2), ()),
    "chunk": (4, 5, 1, 1, Chunk(2), ()),
    "groups": (2, 3, 6, 2, CAUSAL, ()),
    "softcap": (3, 4, 2, 1, CAUSAL, ("softcap",)),
    "bias": (3, 4, 2, 2, FULL, ("bias",)),
    "sinks": (4, 3, 2, 1, CAUSAL, ("sinks",)),
    "alibi": (3, 4, 2, 2, CAUSAL, ("alibi",)),
    "dropout": (3, 4, 2, 2, FULL, ("dropout",)),
    "everything": (4, 4, 2, 1, CAUSAL & Window(2), ("softcap", "bias", "sinks", "alibi", "dropout")),
}


def small(name: str, device: torch.device) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """Returns a function of its differentiable inputs, and these inputs, in fp64."""
    T, S, H, Hk, mask, words = SMALL[name]
    shapes = {"q": (1, T, H, 2), "k": (1, S, Hk, 2), "v": (1, S, Hk, 3)}
    shapes |= {word: {"bias": (H, 1, S), "sinks": (H,)}[word] for word in ("bias", "sinks") if word in words}
    leaves = {n: torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for n, s in shapes.items()}
    options: dict[str, Any] = {"softcap": 1.5} if "softcap" in words else {}
    if "alibi" in words:
        options["alibi"] = torch.rand(H, dtype=torch.float64, device=device)
    if "dropout" in words:
        options |= {"dropout": 0.4, "seed": 3}

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(leaves, tensors, strict=True))
        o, lse = rt.attention_with_lse(**given, mask=mask, backend="eager", **options)
        # leave out rows that see no key: finite differences of -inf are meaningless
        return o, lse[lse.isfinite()]

    return attend, list(leaves.values())


@pytest.mark.parametrize("name", SMALL)
def test_finite_differences(name: str, device: torch.device) -> None:
    attend, leaves = small(name, device)
    assert gradcheck(attend, leaves)


@pytest.mark.parametrize("name", ["full", "causal-more-queries", "groups", "everything"])
def test_finite_differences_of_gradients(name: str, device: torch.device) -> None:
    attend, leaves = small(name, device)
    assert gradgradcheck(attend, leaves)


@pytest.mark.parametrize("name", SMALL)
def test_forward_mode_against_finite_differences(name: str, device: torch.device) -> None:
    attend, leaves = small(name, device)
    assert gradcheck(attend, leaves, check_forward_ad=True, check_backward_ad=False)


def test_forward_mode_chooses_eager(device: torch.device) -> None:
    (q, k, v), mask, _ = CASES["causal"].inputs(device)
    tangent = torch.randn_like(k)
    with forward_ad.dual_level():
        o = rt.attention(q, forward_ad.make_dual(k, tangent), v, mask)
        found = forward_ad.unpack_dual(o).tangent
        o = rt.attention(q, forward_ad.make_dual(k, tangent), v, mask, backend="eager")
        due = forward_ad.unpack_dual(o).tangent
    assert torch.equal(found, due)
    step = 1e-5
    wide = [x.double() for x in (q, k, v, tangent)]
    ends = [rt.attention(wide[0], wide[1] + s * wide[3], wide[2], mask, backend="eager") for s in (step, -step)]
    torch.testing.assert_close(found.double(), (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-4)


def test_torch_func_jvp(device: torch.device) -> None:
    (q, k, v), mask, _ = CASES["t63"].inputs(device)
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    o, found = torch.func.jvp(lambda q, k, v: rt.attention(q, k, v, mask), (q, k, v), tangents)
    torch.testing.assert_close(o, rt.attention(q, k, v, mask, backend="eager"))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip((q, k, v), tangents, strict=True)]
        due = forward_ad.unpack_dual(rt.attention(*duals, mask, backend="eager")).tangent
    torch.testing.assert_close(found, due)


def test_the_others_refuse_forward_mode_and_name_eager(backend: str, device: torch.device) -> None:
    if backend == "eager":
        return test_forward_mode_chooses_eager(device)
    (q, k, v), mask, _ = CASES["causal"].inputs(device)
    with forward_ad.dual_level(), pytest.raises(rt.Unsupported) as raised:
        rt.attention(q, forward_ad.make_dual(k, torch.ones_like(k)), v, mask, backend=backend)
    assert "eager" in str(raised.value)
    return None


def test_the_others_refuse_double_backward_and_name_eager(backend: str, device: torch.device) -> None:
    case = CASES["causal"]
    (q, k, v), mask, _ = case.inputs(device, requires_grad=True)
    reasons = tuple(dispatch.BACKENDS[backend].refusals(case.problem(arch(device)).spec))
    if reasons:
        with pytest.raises(rt.Unsupported, match="eager"):
            rt.attention(q, k, v, mask, backend=backend)
        return
    o = rt.attention(q, k, v, mask, backend=backend)
    grads = torch.autograd.grad(o.square().sum(), (q, k, v), create_graph=True)
    total = sum(grad.square().sum() for grad in grads)
    if backend == "eager":
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(total, (q, k, v)))
    else:
        with pytest.raises(rt.Unsupported) as raised:
            torch.autograd.grad(total, (q, k, v))
        assert str(raised.value) == (
            f"double backward through backend {backend!r}; only backend='eager' has it: "
            "call rooftile.attention(..., backend='eager') where gradients of gradients are needed"
        )


@pytest.mark.parametrize("case", [c for c in tagged("conformance") if not c.lengths], ids=lambda case: case.name)
def test_the_formulas_equal_autograd(case: Case, device: torch.device) -> None:
    (q, k, v), mask, options = case.inputs(device)
    options["softcap"] = case.softcap
    if "seed" in options:
        options["seed"] = torch.tensor([options["seed"]], device=device)
    # for values near the largest fp16 number, differences of products lose their digits
    q, k, v = ((x if case.scatter != "hot" else x / 1e3).double().requires_grad_() for x in (q, k, v))
    leaves = {"q": q, "k": k, "v": v}
    for name in ("bias", "alibi", "sinks"):
        if name in options:
            options[name] = options[name].double().requires_grad_(name != "alibi")
            if name != "alibi":
                leaves[name] = options[name]
    o, lse = reference.attention(q, k, v, mask, **options)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    due = torch.autograd.grad([o, lse], list(leaves.values()), [do, dlse])
    with torch.no_grad():
        found = reference.gradients(do, dlse, q, k, v, mask, **options)._asdict()
    for name, grad in zip(leaves, due, strict=True):
        largest = grad.abs().max().item() if grad.numel() else 0.0
        torch.testing.assert_close(found[f"d{name}"], grad, rtol=0.0, atol=1e-10 * (1 + largest))


def parts_of(options: dict[str, Any], cuts: list[int], q: Tensor, k: Tensor, v: Tensor, backend: str | None):
    """Computes attention over each part of the keys, with the part's columns of the bias."""
    bias = options.get("bias")
    parts = []
    for start, stop in pairwise(cuts):
        here = options | ({"bias": bias[..., start:stop]} if bias is not None else {})
        parts.append(rt.attention_with_lse(q, k[:, start:stop], v[:, start:stop], backend=backend, **here))
    return parts


@pytest.mark.parametrize("cuts", [[0, 90], [0, 20, 90], [0, 0, 33, 64, 90, 90]], ids=["one", "two", "five-two-empty"])
@pytest.mark.parametrize("extra", [(), ("softcap", "bias")], ids=["plain", "softcap-bias"])
def test_merging_disjoint_keys_is_attention_over_all(cuts: list[int], extra: tuple[str, ...], device: torch.device) -> None:
    q, k, v = (torch.randn(2, n, h, 16, dtype=torch.float64, device=device) for n, h in ((37, 4), (90, 2), (90, 2)))
    options = {"softcap": 3.0, "bias": torch.randn(4, 37, 90, dtype=torch.float64, device=device)} if extra else {}
    leaves = [x.requires_grad_() for x in (q, k, v, options.get("bias")) if x is not None]
    do, dlse = torch.randn(2, 37, 4, 16, device=device).double(), torch.randn(2, 4, 37, device=device).double()

    answers = []
    for o, lse in (
        rt.merge(parts_of(options, cuts, q, k, v, "eager")),
        rt.attention_with_lse(q, k, v, backend="eager", **options),
    ):
        answers.append((o, lse, *torch.autograd.grad([o, lse], leaves, [do, dlse])))
    for found, due in zip(*answers, strict=True):
        torch.testing.assert_close(found, due, rtol=1e-10, atol=1e-12)


def test_merging_runs_on_every_backend(backend: str, device: torch.device) -> None:
    case = CASES["mha"]
    (q, k, v), _, _ = case.inputs(device, requires_grad=True)
    spec = case.problem(arch(device), needs_lse=True).spec
    if tuple(dispatch.BACKENDS[backend].refusals(spec)):
        with pytest.raises(rt.Unsupported):
            rt.attention_with_lse(q, k, v, backend=backend)
        return
    o, lse = rt.merge(parts_of({}, [0, 50, 50, 128], q, k, v, backend))
    whole, whole_lse = rt.attention_with_lse(*(x.double() for x in (q, k, v)), backend="eager")
    incoming = [torch.randn_like(o), torch.randn_like(lse)]
    found = (o, lse, *torch.autograd.grad([o, lse], (q, k, v), incoming))
    due = (whole, whole_lse, *torch.autograd.grad([whole, whole_lse], (q, k, v), [x.double() for x in incoming]))
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=2e-5, atol=2e-5)


def test_merging_nothing_but_empty_parts_gives_no_key(device: torch.device) -> None:
    q = torch.randn(1, 5, 2, 8, device=device, requires_grad=True)
    k = torch.randn(1, 0, 2, 8, device=device)
    o, lse = rt.merge([rt.attention_with_lse(q, k, k, backend="eager") for _ in range(2)])
    assert torch.equal(o, torch.zeros_like(o))
    assert (lse == -torch.inf).all()
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert torch.equal(dq, torch.zeros_like(dq))


def test_merging_packed_sequences(device: torch.device) -> None:
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64, device=device) for n in (11, 20, 20))
    cu_q, cu_k = torch.tensor([0, 4, 11]), torch.tensor([0, 12, 20])
    first = torch.cat([torch.arange(0, 5), torch.arange(12, 14)]), torch.tensor([0, 5, 7])
    second = torch.cat([torch.arange(5, 12), torch.arange(14, 20)]), torch.tensor([0, 7, 13])
    parts = [rt.attention_packed_with_lse(q, k[keys], v[keys], cu_q, cu, backend="eager") for keys, cu in (first, second)]
    for found, due in zip(rt.merge(parts), rt.attention_packed_with_lse(q, k, v, cu_q, cu_k, backend="eager"), strict=True):
        torch.testing.assert_close(found, due)
