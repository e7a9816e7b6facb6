"""Refusals: their exact text; problems without one run; a named backend is never replaced."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

import rooftile as rt
from rooftile.exact import dispatch
from rooftile.exact.cases import CASES, Case
from rooftile.exact.spec import Spec
from rooftile.runtime.devices import arch
from tests.conformance.exact import answer
from tests.conformance.random_cases import draw_case

SPEC = Spec(dtype=torch.bfloat16, dim=80, dim_v=80, group=4, mask=rt.CAUSAL & rt.Window(64), scale=0.1, needs_grad=True)


def stub(name: str, *reasons: str) -> SimpleNamespace:
    return SimpleNamespace(NAME=name, refusals=lambda spec: iter(reasons))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch):
    """Builds a dispatch with three backends that refuse with given reasons."""

    def install(fast: tuple[str, ...], middle: tuple[str, ...], plain: tuple[str, ...]) -> None:
        order = (stub("fast", *fast), stub("middle", *middle), stub("plain", *plain))
        monkeypatch.setattr(dispatch, "ORDER", order)
        monkeypatch.setattr(dispatch, "BACKENDS", {backend.NAME: backend for backend in order})

    return install


def test_the_first_that_does_not_refuse_runs(three) -> None:
    three(("head dim 80; has 64, 128",), (), ())
    assert dispatch.select(SPEC).NAME == "middle"
    assert dispatch.select(SPEC, "plain").NAME == "plain"
    assert dispatch.verdicts(SPEC) == {"fast": ("head dim 80; has 64, 128",), "middle": (), "plain": ()}


def test_the_message_when_a_named_backend_refuses(three) -> None:
    three(("head dim 80; has 64, 128", "tensors are on cpu; needs sm90"), (), ())
    with pytest.raises(rt.Unsupported) as raised:
        dispatch.select(SPEC, "fast")
    assert str(raised.value).split("\n") == [
        "backend 'fast' cannot run this attention problem",
        "  problem  bf16 d80 gqa4 causal & window(64) dense fwd+bwd on cpu",
        "  fast     - head dim 80; has 64, 128",
        "           - tensors are on cpu; needs sm90",
        "  instead  middle, plain can; backend=None picks the fastest",
    ]


def test_the_message_when_a_named_backend_and_every_other_refuses(three) -> None:
    three(("head dim 80; has 64, 128", "tensors are on cpu; needs sm90"), ("no windows", "no groups"), ("no bf16",))
    with pytest.raises(rt.Unsupported) as raised:
        dispatch.select(SPEC, "middle")
    assert str(raised.value).split("\n") == [
        "backend 'middle' cannot run this attention problem",
        "  problem  bf16 d80 gqa4 causal & window(64) dense fwd+bwd on cpu",
        "  middle   - no windows",
        "           - no groups",
        "  nearest  plain: 1 thing(s) to change",
    ]


def test_the_message_when_every_backend_refuses(three) -> None:
    three(("head dim 80; has 64, 128", "tensors are on cpu; needs sm90"), ("no windows", "no groups"), ("no bf16",))
    with pytest.raises(rt.Unsupported) as raised:
        dispatch.select(SPEC)
    assert str(raised.value).split("\n") == [
        "no backend can run this attention problem",
        "  problem  bf16 d80 gqa4 causal & window(64) dense fwd+bwd on cpu",
        "  fast     - head dim 80; has 64, 128",
        "           - tensors are on cpu; needs sm90",
        "  middle   - no windows",
        "           - no groups",
        "  plain    - no bf16",
        "  nearest  plain: 1 thing(s) to change",
    ]


def test_explain_lists_every_backend(three) -> None:
    three(("head dim 80; has 64, 128", "tensors are on cpu; needs sm90"), (), ())
    assert dispatch.explain(SPEC).split("\n") == [
        "problem  bf16 d80 gqa4 causal & window(64) dense fwd+bwd on cpu",
        "fast     - head dim 80; has 64, 128",
        "         - tensors are on cpu; needs sm90",
        "middle   runs it",
        "plain    could, but middle comes first",
    ]


def test_explain_of_tensors_names_what_attention_would_run(device: torch.device) -> None:
    (q, k, v), mask, _ = CASES["gqa2"].inputs(device)
    lines = rt.explain(q, k, v, mask, softcap=2.0, sinks=torch.zeros(4, device=device), needs_lse=True).split("\n")
    assert lines[1] == f"problem  fp32 d64 gqa2 causal dense softcap(2) sinks fwd lse on {arch(device)}"
    assert [line for line in lines if line.endswith("runs it")]
    named = {line.split()[0] for line in lines[2:] if not line.startswith(" ")}
    assert named == set(dispatch.BACKENDS)


def test_eager_says_what_it_lacks() -> None:
    spec = Spec(dtype=torch.float32, dim=64, dim_v=64, scale=0.125, precision=rt.Precision(), has_alibi=True)
    due = f"alibi with precision {rt.Precision()}; has masks, groups, softcap and sinks with it"
    assert list(dispatch.BACKENDS["eager"].refusals(spec)) == [due]


@pytest.mark.parametrize("arch_word", ["cpu", "sm80", "sm90", "sm100", "mps"])
def test_refusals_are_pure_sentences(arch_word: str) -> None:
    """Refusals need no tensor and no device, are the same twice, and are not empty."""
    for case in CASES.values():
        spec = case.problem(arch_word, needs_lse=True).spec
        first = dispatch.verdicts(spec)
        assert first == dispatch.verdicts(spec)
        for reasons in first.values():
            assert len(set(reasons)) == len(reasons)
            for reason in reasons:
                assert reason == reason.strip() != ""
                assert "\n" not in reason
        assert dispatch.explain(spec).count("runs it") == 1


@pytest.mark.parametrize("seed", range(40))
def test_what_is_not_refused_runs(seed: int, backend: str, device: torch.device) -> None:
    case = draw_case(random.Random(seed))
    phase = ("forward", "backward-lse", "backward", "forward-lse")[seed % 4]
    needs_grad, needs_lse = phase.startswith("backward"), phase.endswith("lse")
    spec = case.problem(arch(device), needs_grad=needs_grad, needs_lse=needs_lse).spec
    if tuple(dispatch.BACKENDS[backend].refusals(spec)):
        with pytest.raises(rt.Unsupported, match=f"backend '{backend}' cannot run"):
            answer(case, phase, backend, device)
    else:
        for name, x in answer(case, phase, backend, device).items():
            assert not x.isnan().any(), name


def test_a_named_backend_is_never_replaced(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object) -> None:
        raise AssertionError("another backend ran")

    for other in dispatch.ORDER:
        if backend != other.NAME:
            monkeypatch.setattr(other, entry(other.NAME), run)
    for case in (CASES["mha"], CASES["everything"], CASES["packed"], CASES["d320"]):
        able = not tuple(dispatch.BACKENDS[backend].refusals(case.problem(arch(device), needs_grad=False).spec))
        if able:
            assert answer(case, "forward", backend, device)["o"].isfinite().all()
        else:
            with pytest.raises(rt.Unsupported, match=f"backend '{backend}' cannot run"):
                answer(case, "forward", backend, device)


@pytest.mark.parametrize("name", ["mha", "causal", "everything", "packed", "d320", "fp16-hot"])
def test_with_none_named_the_first_that_can_runs(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Case = CASES[name]
    verdicts = dispatch.verdicts(case.problem(arch(device), needs_grad=False).spec)
    due = next(backend for backend, reasons in verdicts.items() if not reasons)
    ran = []
    for backend in dispatch.ORDER:
        word = entry(backend.NAME)
        monkeypatch.setattr(backend, word, noting(ran, backend.NAME, getattr(backend, word)))
    answer(case, "forward", None, device)
    assert ran == [due]


def entry(backend: str) -> str:
    """Returns the function that a call enters: eager runs outside the operator, where autograd sees every step."""
    return "attend" if backend == "eager" else "forward"


def noting(ran: list[str], name: str, function):
    def run(*args):
        ran.append(name)
        return function(*args)

    return run


@pytest.mark.parametrize(("name", "device"), [("hopper", "sm90"), ("sdpa", "cpu")])
def test_who_lends_a_backend_gradients_runs_what_it_runs(name: str, device: str) -> None:
    spec = Spec(dtype=torch.bfloat16, dim=64, dim_v=64, scale=0.125, needs_grad=True, device=device)
    assert ("hopper" if device == "sm90" else "sdpa") == dispatch.select(spec).NAME
    lent = dispatch.LENT[name]
    assert dispatch.backward_of(name).keywords == lent
    for function in lent.values():
        owner = function.__module__.rsplit(".", 1)[-1]
        assert dispatch.verdicts(spec)[owner] == (), f"{owner} refuses what {name} runs"


def test_only_these_backends_borrow() -> None:
    assert set(dispatch.LENT) == {"hopper", "sdpa"}
