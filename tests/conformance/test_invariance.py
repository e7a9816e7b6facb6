"""Invariance: results do not depend on neighbours, the run, the layout, the backend's dropout, or hidden inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact import dispatch
from rooftile.exact.cases import CASES, Case
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window, materialise
from rooftile.exact.reference.philox import keep_mask
from rooftile.runtime.devices import arch

LENGTHS = ((70, 70), (1, 130), (129, 129), (40, 65))
EVERYTHING: dict[str, Any] = {"softcap": 4.0, "alibi": True, "sinks": True}


def cases(*, packed: bool) -> list[Case]:
    """Returns three problems: causal with groups, with every option but dropout, and in bf16."""
    shape: dict[str, Any] = {"lengths": LENGTHS} if packed else {"B": 3, "T": 129, "S": 150}
    shared = {"tags": frozenset(), "H": 4, "Hk": 2, "dim": 32, "mask": CAUSAL} | shape
    return [
        Case(name="plain", **shared),
        Case(name="everything", **shared, **EVERYTHING),
        Case(name="bf16", **shared, dtype="bf16"),
    ]


def refused(case: Case, backend: str, device: torch.device, **options: Any) -> bool:
    """Returns whether the backend refuses the case with gradients and lse; if so, asserts its reason."""
    spec = case.problem(arch(device), needs_lse=True).spec
    spec = replace(spec, **{"deterministic": True} | options)
    if not tuple(dispatch.BACKENDS[backend].refusals(spec)):
        return False
    with pytest.raises(rt.Unsupported):
        run(case.inputs(device, requires_grad=True), backend)
    return True


def run(inputs: Any, backend: str | None, **changed: Any) -> list[Tensor]:
    """Returns o, lse and the gradients of q, k, v (and sinks), for incoming gradients that depend only on position."""
    (q, k, v, *offsets), mask, options = inputs
    attend = rt.attention_packed_with_lse if offsets else rt.attention_with_lse
    o, lse = attend(q, k, v, *offsets, mask, backend=backend, **{"deterministic": True} | options | changed)
    leaves = [x for x in (q, k, v, options.get("bias"), options.get("sinks")) if x is not None and x.requires_grad]
    return [o, lse, *torch.autograd.grad([o, lse], leaves, [o.detach().cos(), torch.ones_like(lse)])]


def fresh(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns copies that require gradients."""
    return tuple(x.clone().requires_grad_() for x in tensors)


def assert_bits(found: list[Tensor], due: list[Tensor]) -> None:
    for n, (x, y) in enumerate(zip(found, due, strict=True)):
        name = ("o", "lse", "dq", "dk", "dv", "dbias or dsinks", "dsinks")[n]
        wrong = (x != y).nonzero()
        assert torch.equal(x, y), f"{name} differs in {len(wrong)} places; {int(x.isnan().sum())} are NaN; first {wrong[:1]}"


@pytest.mark.parametrize("case", cases(packed=False), ids=lambda case: case.name)
def test_a_sequence_alone_equals_itself_in_a_batch(case: Case, backend: str, device: torch.device) -> None:
    if refused(case, backend, device):
        return
    (q, k, v), mask, options = case.inputs(device)
    whole = run((fresh(q, k, v), mask, options), backend)
    for b in range(case.B):
        alone = fresh(*(x[b : b + 1] for x in (q, k, v)))
        assert_bits(run((alone, mask, options), backend), [x[b : b + 1] for x in whole])


@pytest.mark.parametrize("case", cases(packed=True), ids=lambda case: case.name)
def test_a_packed_sequence_alone_equals_itself_among_others(case: Case, backend: str, device: torch.device) -> None:
    if refused(case, backend, device):
        return
    (q, k, v, cu_q, cu_k), mask, options = case.inputs(device)
    whole = run(((*fresh(q, k, v), cu_q, cu_k), mask, options), backend)
    for b, (T, S) in enumerate(LENGTHS):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = fresh(q[rows], k[keys], v[keys])
        offsets = (torch.tensor([0, T], device=device), torch.tensor([0, S], device=device))
        o, lse, dq, dk, dv = whole
        due = [o[rows], lse[:, rows], dq[rows], dk[keys], dv[keys]]
        assert_bits(run((alone + offsets, mask, options), backend), due)


@pytest.mark.parametrize("name", ["causal-window", "everything", "packed-everything", "gqa16", "bf16", "bias-keys"])
def test_two_runs_give_the_same_bits(name: str, backend: str, device: torch.device) -> None:
    case = CASES[name]
    if refused(case, backend, device):
        return
    first, second = (run(case.inputs(device, requires_grad=True), backend) for _ in range(2))
    assert_bits(first, second)


@pytest.mark.parametrize("name", ["causal", "everything", "packed-everything"])
def test_the_forward_gives_the_same_bits_without_being_asked(name: str, backend: str, device: torch.device) -> None:
    case = CASES[name]
    if refused(case, backend, device, deterministic=False):
        return
    first, second = (run(case.inputs(device, requires_grad=True), backend, deterministic=False)[:2] for _ in range(2))
    assert_bits(first, second)


def dropped(backend: str, mask: Mask, T: int, S: int, H: int, B: int, device: torch.device, dropout: float) -> Tensor:
    """Returns the dropped weights of a backend (B, H, T, S): with one-hot values, o equals the weights."""
    q = torch.zeros(B, T, H, 16, device=device)
    k = torch.zeros(B, S, H, 16, device=device)
    v = torch.eye(S, device=device)[None, :, None].expand(B, S, H, S)
    o = rt.attention(q, k, v, mask, dropout=dropout, seed=-5_000_000_017, backend=backend)
    return o.transpose(1, 2) == 0


def test_every_backend_drops_the_same_weights(backend: str, device: torch.device) -> None:
    B, H, T, S, dropout = 2, 3, 70, 96, 0.3
    case = Case(name="", tags=frozenset(), B=B, T=T, S=S, H=H, Hk=H, dim=16, dim_v=S, dropout=dropout)
    if tuple(dispatch.BACKENDS[backend].refusals(case.problem(arch(device), needs_grad=False).spec)):
        with pytest.raises(rt.Unsupported):
            dropped(backend, FULL, T, S, H, B, device, dropout)
        return
    index = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, S)), indexing="ij")
    due = ~keep_mask(torch.tensor([-5_000_000_017]), dropout, *index)
    assert torch.equal(dropped(backend, FULL, T, S, H, B, device, dropout).cpu(), due)


def test_dropout_without_a_seed_follows_torchs_generator(device: torch.device) -> None:
    (q, k, v), mask, _ = CASES["t65"].inputs(device)

    def draw() -> Tensor:
        torch.manual_seed(5)
        return rt.attention(q, k, v, mask, dropout=0.5)

    first = draw()
    assert not torch.equal(first, rt.attention(q, k, v, mask, dropout=0.5))
    assert torch.equal(first, draw())


@pytest.mark.parametrize("mask", [CAUSAL, Window(9, 3), Prefix(20), Chunk(16)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_packed_equals_dense(mask: Mask, dropout: float, backend: str, device: torch.device) -> None:
    """A dense and a packed batch of sequences of one length give the same numbers and drop the same weights."""
    B, T, S, H, Hk = 3, 65, 80, 4, 2
    shape: dict[str, Any] = {"tags": frozenset(), "H": H, "Hk": Hk, "dim": 16, "mask": mask, "dropout": dropout}
    dense_case, packed_case = Case(name="", B=B, T=T, S=S, **shape), Case(name="", lengths=((T, S),) * B, **shape)
    if refused(dense_case, backend, device) or refused(packed_case, backend, device):
        return
    (q, k, v), _, options = dense_case.inputs(device)
    dense = run((fresh(q, k, v), mask, options), backend)
    flat = fresh(*(x.flatten(0, 1) for x in (q, k, v)))
    offsets = tuple(torch.arange(0, B + 1, device=device) * n for n in (T, S))
    packed = run((flat + offsets, mask, options), backend)
    due = [x.transpose(0, 1).flatten(1) if n == 1 else x.flatten(0, 1) for n, x in enumerate(dense)]
    for x, y in zip(packed, due, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("mask", "T", "S"),
    [
        (CAUSAL & Window(10), 40, 130),
        (CAUSAL, 80, 40),
        (Window(5, 0), 33, 100),
        (Chunk(32), 40, 100),
        (Prefix(9) & Window(12, 20), 70, 30),
    ],
    ids=str,
)
def test_what_the_mask_hides_does_not_leak(poison: float, mask: Mask, T: int, S: int, backend: str, device: torch.device) -> None:
    """Keys that no query sees, and queries that see no key, may hold any number."""
    case = Case(name="", tags=frozenset(), B=2, T=T, S=S, H=2, Hk=1, dim=32, mask=mask)
    if refused(case, backend, device):
        return
    (q, k, v), _, _ = case.inputs(device)
    clean = run((fresh(q, k, v), mask, {}), backend)
    visible = materialise(mask, T, S, device)
    hidden_keys, hidden_queries = ~visible.any(0), ~visible.any(1)
    assert hidden_keys.any() or hidden_queries.any()
    for x, hidden in ((q, hidden_queries), (k, hidden_keys), (v, hidden_keys)):
        x[:, hidden] = poison
    found = run((fresh(q, k, v), mask, {}), backend)
    assert all(x[x != -math.inf].isfinite().all() for x in clean)
    # a backend may take a slower path for non-finite inputs
    for x, y in zip(found, clean, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["k", "v", "q"])
def test_a_nan_that_is_seen_shows_exactly_where_it_is_seen(which: str, backend: str, device: torch.device) -> None:
    case = Case(name="", tags=frozenset(), B=1, T=90, S=90, H=2, Hk=1, dim=32, mask=CAUSAL)
    if refused(case, backend, device):
        return
    (q, k, v), mask, _ = case.inputs(device)
    {"q": q, "k": k, "v": v}[which][:, 50, 0] = math.nan
    o = rt.attention(q, k, v, mask, backend=backend)
    lost = o.isnan().all(-1)[0]  # (T, H)
    rows = torch.arange(90, device=device)[:, None].expand(90, 2)
    due = (rows >= 50) if which != "q" else (rows == 50) & torch.tensor([True, False], device=device)
    assert torch.equal(lost, due)
    assert o[0][~due].isfinite().all()


def test_a_nan_in_one_packed_sequence_stays_there(backend: str, device: torch.device) -> None:
    case = Case(name="", tags=frozenset(), H=2, Hk=2, dim=32, mask=FULL, lengths=((40, 40), (33, 50), (20, 20)))
    if refused(case, backend, device):
        return
    (q, k, v, *offsets), mask, _ = case.inputs(device)
    clean = run(((*fresh(q, k, v), *offsets), mask, {}), backend)
    for x, start, stop in ((q, 40, 73), (k, 40, 90), (v, 40, 90)):
        x[start:stop] = math.nan
    found = run(((*fresh(q, k, v), *offsets), mask, {}), backend)
    for x, y, start, stop in zip(found, clean, (40, 40, 40, 40, 40), (73, 73, 73, 90, 90), strict=True):
        rows = x.movedim(0, 1) if x.ndim == 2 else x, y.movedim(0, 1) if y.ndim == 2 else y
        kept = [torch.cat([z[:start], z[stop:]]) for z in rows]
        assert kept[1].isfinite().all()
        torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-5)


def test_offsets_and_sinks_may_be_every_other_word(backend: str, device: torch.device) -> None:
    what: dict[str, Any] = {"dim": 64, "mask": CAUSAL, "dtype": "bf16", "lengths": ((40, 40), (33, 50), (20, 20))}
    case = Case(name="", tags=frozenset(), H=4, Hk=2, sinks=True, **what)
    if refused(case, backend, device):
        return
    (q, k, v, *offsets), mask, options = case.inputs(device)
    due = run(((*fresh(q, k, v), *offsets), mask, options), backend)
    spread = [torch.stack([x, x + 7], 1)[:, 0] for x in offsets]
    sinks = torch.stack([options["sinks"], options["sinks"] + 7], 1)[:, 0]
    assert not any(x.is_contiguous() for x in (*spread, sinks))
    found = run(((*fresh(q, k, v), *spread), mask, options | {"sinks": sinks}), backend)
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.002)


def test_rows_that_see_nothing_are_zero_and_give_nothing(backend: str, device: torch.device) -> None:
    case = CASES["causal-more-queries"]
    if refused(case, backend, device):
        return
    inputs = case.inputs(device, requires_grad=True)
    o, lse, dq, *_ = run(inputs, backend)
    blind = case.T - case.S
    assert (o[:, :blind] == 0).all()
    assert (lse[..., :blind] == -math.inf).all()
    assert (dq[:, :blind] == 0).all()
    assert lse[..., blind:].isfinite().all()
