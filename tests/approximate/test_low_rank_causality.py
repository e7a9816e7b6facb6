"""The causality that METHODS declares for the low-rank methods, tested by editing what comes later; and their costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.methods import CLASSES

MASKS = {"CAUSAL": rt.CAUSAL, "FULL": rt.FULL}
Call = Callable[[Tensor, Tensor, Tensor, rt.Mask], Tensor]
CALLS: dict[str, Call] = {
    "linear": lambda q, k, v, mask: ap.linear(q, k, v, mask),
    "performer": lambda q, k, v, mask: ap.performer(q, k, v, mask, features=ap.Features.draw(q.shape[-1], 16)),
    "linformer": lambda q, k, v, mask: ap.linformer(q, k, v, torch.eye(8, 200)[None] + 0.1, mask=mask),
}
MODES = [(name, mode) for name in CALLS for mode in ap.METHODS[name].causality]


def edited(name: str, mode: str, which: str) -> tuple[Tensor, Tensor]:
    """Returns the rows before an edit of what comes later in q, k or v, and the rows before it without."""
    tensors = {n: torch.randn(2, 160, h, 8) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    due = CALLS[name](*tensors.values(), MASKS[mode])
    tensors[which] = torch.cat((tensors[which][:, :140], 3 * torch.randn(2, 20, *tensors[which].shape[2:])), 1)
    return CALLS[name](*tensors.values(), MASKS[mode])[:, :140], due[:, :140]


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_method_is_of_the_class_that_it_declares(name: str, mode: str, which: str) -> None:
    declared = ap.METHODS[name].causality[mode]
    assert declared <= CLASSES
    found, due = edited(name, mode, which)
    if "value-causal" in declared and (which == "v" or "strict" in declared):
        assert torch.equal(found, due)
    elif which != "q":
        # in these methods a row never sees another query
        assert not torch.allclose(found, due)
    else:
        assert torch.equal(found, due)


@pytest.mark.parametrize("name", [name for name, mode in MODES if "decodable" in ap.METHODS[name].causality[mode]])
def test_decodable_methods_decode(name: str) -> None:
    q, k, v = (torch.randn(2, 30, h, 8) for h in (4, 2, 2))
    options = {"features": ap.Features.draw(8, 16)} if name == "performer" else {}
    method, state, rows = getattr(ap, f"{name}_with_state"), None, []
    for t in range(30):
        one = (x[:, t : t + 1] for x in (q, k, v))
        o, state = method(*one, rt.CAUSAL, state=state, **options)
        rows.append(o)
    torch.testing.assert_close(torch.cat(rows, 1), CALLS[name](q, k, v, rt.CAUSAL), rtol=1e-4, atol=1e-5)


def test_every_method_has_its_paper_and_its_function() -> None:
    for name, method in ap.METHODS.items():
        assert method.name == name
        assert callable(getattr(ap, name))
        assert len(method.arxiv.split(".")) == 2
        assert method.title


def test_costs_of_linear_methods_are_those_of_their_operator() -> None:
    sizes = {"B": 2, "T": 30, "S": 30, "H": 4, "Hk": 2, "D": 8, "Dv": 6}
    tokens = 2 * 30
    state, read = 2 * 8 * 6 * 2 * tokens, 2 * 8 * 6 * 4 * tokens
    assert ap.METHODS["linear"].cost(**sizes) == (state + read, tokens * (4 * 8 + 2 * 8 + 2 * 6 + 4 * 6) * 2)
    found = ap.METHODS["performer"].cost(**sizes, m=16).flops
    assert found == 2 * (state + read) + 2 * 16 * 8 * tokens * (4 + 2)
    assert ap.METHODS["linear"].cost(**sizes, phase="bwd").flops == 3 * state + 2 * read


@pytest.mark.parametrize("phase", ["fwd", "bwd"])
def test_the_cost_of_linformer_is_what_torch_counts(phase: str) -> None:
    sizes = {"B": 2, "T": 30, "S": 20, "H": 4, "Hk": 4, "D": 8, "Dv": 8}
    q, k, v = (torch.randn(2, n, 4, 8, requires_grad=True) for n in (30, 20, 20))
    e, f = torch.randn(2, 4, 5, 20, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        o = ap.linformer(q, k, v, e, f, backend="eager")
        forward = counter.get_total_flops()
        o.sum().backward()
    due = ap.METHODS["linformer"].cost(**sizes, r=5, heads=4, shared=False, itemsize=4, phase=phase)
    # scores are computed again in our backward, and kept in the definition's
    again = 2 * 8 * 5 * 30 * 4 * 2
    assert due.flops == (forward if phase == "fwd" else counter.get_total_flops() - forward + again)
