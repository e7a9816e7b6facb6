"""The tolerance: a backend's error is at most twice that of the plain definition in the same dtype, plus rounding.

    max|x - exact|  <=  2 max|plain - exact| + 8 ulp        and the same for the mean

`exact` is the definition in fp64, `plain` is the definition in the case's dtype, and x is o, lse or a gradient. There
is no table of tolerances: each case brings its own. Where scores share an offset, fp32 cannot hold their differences either:
`plain` is then the worse of the definitions in the case's dtype and in fp32, in which every backend adds up.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact import dispatch, reference
from rooftile.exact.cases import Case
from rooftile.exact.spec import DTYPES, Spec
from rooftile.runtime.devices import arch

# the phases: `attention` or `attention_with_lse`, alone or with gradients of all results
PHASES = ("forward", "forward-lse", "backward", "backward-lse")


def check(case: Case, phase: str, backend: str, device: torch.device) -> None:
    """Asserts that the backend equals the definition on this case, or refuses it with a reason."""
    reasons = tuple(dispatch.BACKENDS[backend].refusals(spec_of(case, phase, device)))
    if not reasons:
        dtypes = {DTYPES[case.dtype], torch.float32} if case.offset else {DTYPES[case.dtype]}
        plain = [definition(case, phase, device, dtype) for dtype in dtypes]
        exact = definition(case, phase, device, torch.float64)
        assert_exact(case, answer(case, phase, backend, device), exact, plain, times=_times(case, backend, device))
        return
    with pytest.raises(rt.Unsupported) as refused:
        answer(case, phase, backend, device)
    for reason in reasons:
        assert reason.strip()
        assert reason in str(refused.value)


def _times(case: Case, backend: str, device: torch.device) -> int:
    """Returns how many times the plain definition's error a backend may have."""
    # PyTorch's backward on a GPU computes weights again by blocks of keys, whose last bits differ from the forward's
    return 4 if backend == "sdpa" and device.type == "cuda" and abs(case.offset) >= 1e6 else 2


def spec_of(case: Case, phase: str, device: torch.device) -> Spec:
    needs_grad, needs_lse = phase.startswith("backward"), phase.endswith("lse")
    return case.problem(arch(device), needs_grad=needs_grad, needs_lse=needs_lse).spec


def answer(case: Case, phase: str, backend: str | None, device: torch.device) -> dict[str, Tensor]:
    """Returns rooftile's results: those of o, lse, dq, dk, dv, dbias, dsinks that the phase and the case have."""
    backward, with_lse = phase.startswith("backward"), phase.endswith("lse")
    tensors, mask, options = case.inputs(device, requires_grad=backward)
    words = ("packed",) * bool(case.lengths) + ("with_lse",) * with_lse
    attention = getattr(rt, "_".join(["attention", *words]))
    # the specs of the cases have the default determinism
    found = attention(*tensors, mask, **options, backend=backend, deterministic=False)
    outputs = dict(zip(("o", "lse"), found, strict=True)) if with_lse else {"o": found}
    leaves = _leaves(tensors, options)
    grads = _gradients(case, outputs, leaves) if backward else {}
    _assert_contract(outputs, grads, leaves)
    return outputs | grads


def definition(case: Case, phase: str, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the same from the definition in a dtype, differentiated by autograd."""
    backward = phase.startswith("backward")
    tensors, mask, options = case.inputs(device)
    tensors = tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)
    for name in ("bias", "alibi", "sinks"):
        if name in options:
            options[name] = options[name].to(dtype)
    leaves = _leaves(tensors, options)
    for x in leaves.values():
        x.requires_grad_(backward)
    if "seed" in options:
        options["seed"] = torch.tensor([options["seed"]], device=device)
    attention = reference.attention_packed if case.lengths else reference.attention
    o, lse = attention(*tensors, mask, **options | {"softcap": case.softcap})
    outputs = {"o": o, "lse": lse} if phase.endswith("lse") else {"o": o}
    return outputs | (_gradients(case, outputs, leaves) if backward else {})


def assert_exact(
    case: Case, found: dict[str, Tensor], exact: dict[str, Tensor], plain: list[dict[str, Tensor]], times: int = 2
) -> None:
    """Asserts that `found` is within the tolerance given by `exact` and `plain`, tensor by tensor."""
    assert found.keys() == exact.keys() == plain[0].keys()
    dtype = DTYPES[case.dtype]
    # lse is as large as scores are, whose last bits every weight loses; with an offset it is larger than any term
    largest = max((_magnitude(x) for name, x in exact.items() if name != "lse" or not case.offset), default=0.0)
    # if terms cancel, the rounding of the terms remains, and every backend sums them in fp32 at best
    floor = ulp(torch.float64 if dtype == torch.float64 else torch.float32, largest)
    # a weight is the exponential of a difference of scores: for large scores its error is that of their last bit in fp32
    floor = max(floor, 0.5 * largest * _last_bit_of_scores(case))
    for name, due in exact.items():
        x = found[name].detach().to(torch.float64)
        assert x.shape == due.shape, name
        assert torch.equal(x == -math.inf, due == -math.inf), f"{name}: -inf in other places"
        seen = due != -math.inf
        wrong, *usual = ((y[seen].double() - due[seen]).abs() for y in (x, *(each[name].detach() for each in plain)))
        overflow = f"{name}: the definition overflows {dtype} here, so this case shows nothing"
        assert all(each.isfinite().all() for each in usual), overflow
        if not seen.any():
            continue
        slack = 8 * max(ulp(dtype, _magnitude(due)), floor)
        if name == "dbias" and "S" not in case.bias:
            # a row's terms add up to zero; a forward and a backward that round scores to neighbours leave their last bit
            slack += 8 * largest * ulp(torch.float32, min(abs(case.offset), 2.0**12))
        for word, size in (("max", torch.amax), ("mean", torch.mean)):
            got, most = size(wrong).item(), times * max(size(each).item() for each in usual) + slack
            # written so that NaN fails
            assert got <= most, f"{name}: {word} error {got:.3g}; due {most:.3g}, at magnitude {_magnitude(due):.3g}"


def _last_bit_of_scores(case: Case) -> float:
    """Returns the error of exponentials of scores beyond a thousand, in units of log2; at most what fp16 leaves of a weight."""
    (q, k, _, *_), _, _ = case.inputs(torch.device("cpu"))
    if not q.numel() or not k.numel():
        return 0.0
    longest = [x.double().norm(dim=-1).max().item() for x in (q, k)]
    reach = abs(case.problem().spec.scale) * longest[0] * longest[1] / math.log(2)
    return min(ulp(torch.float32, reach), 2.0**-11) if reach > 1000 else 0.0


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    """Returns the spacing of a dtype's numbers at a magnitude."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(magnitude, info.tiny)))


def _magnitude(x: Tensor) -> float:
    x = x.detach()[x.detach().isfinite()]
    return x.abs().max().item() if x.numel() else 0.0


def _leaves(tensors: tuple[Tensor, ...], options: dict) -> dict[str, Tensor]:
    """Returns the inputs that have gradients, by name."""
    named = dict(zip(("q", "k", "v"), tensors[:3], strict=True))
    return named | {name: options[name] for name in ("bias", "sinks") if name in options}


def _gradients(case: Case, outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    # "hot" values and their gradients are near the largest fp16 number: dk of larger ones would overflow
    size = 1e-6 if case.scatter == "hot" else 1.0
    incoming = {}
    for name, x in outputs.items():
        drawn = torch.randn(x.shape, generator=generator) * size
        # both use the same numbers, rounded to the case's dtype
        incoming[name] = drawn.to(DTYPES[case.dtype]).to(x.device, x.dtype)
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), list(incoming.values()))
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _assert_contract(outputs: dict[str, Tensor], grads: dict[str, Tensor], leaves: dict[str, Tensor]) -> None:
    """Asserts the shapes, dtypes and strides of the backends' contract."""
    q, v = leaves["q"], leaves["v"]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    assert outputs["o"].shape == (*q.shape[:-1], v.shape[-1])
    assert outputs["o"].dtype == q.dtype
    if "lse" in outputs:
        assert outputs["lse"].mT.shape == q.shape[:-1]
        assert outputs["lse"].dtype == wide
    assert all(x.is_contiguous() for x in outputs.values())
    for name, x in leaves.items():
        if grads:
            assert grads[f"d{name}"].shape == x.shape, name
            assert grads[f"d{name}"].dtype == x.dtype, name
