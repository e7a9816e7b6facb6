"""Holds every method to the classes that METHODS declares, by editing what comes later and by cutting it off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rooftile import approximate as ap
from rooftile.approximate.methods import CLASSES
from tests.approximate.calls import CALLS, inputs

MODES = [(name, mode) for name, method in ap.METHODS.items() for mode in method.causality]
# T, and the first token that is edited
TOKENS, CUT = 90, 70


def rows_after_an_edit(name: str, mode: str, which: str) -> tuple[Tensor, Tensor]:
    """The rows before the cut, with and without an edit of one input from the cut on."""
    tensors = inputs(TOKENS)
    due = CALLS[name].run(*tensors.values(), mode)[:, :CUT]
    tensors[which] = torch.cat([tensors[which][:, :CUT], 3 * torch.randn_like(tensors[which][:, CUT:])], 1)
    return CALLS[name].run(*tensors.values(), mode)[:, :CUT], due


def test_every_method_has_a_call() -> None:
    assert CALLS.keys() == ap.METHODS.keys()
    for method in ap.METHODS.values():
        assert all(classes <= CLASSES for classes in method.causality.values())
        assert method.takes <= {"groups", "packed", "gradients", "decode"}


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_later_values(name: str, mode: str) -> None:
    found, due = rows_after_an_edit(name, mode, "v")
    if "value-causal" in ap.METHODS[name].causality[mode]:
        assert torch.equal(found, due)
    else:
        assert not torch.allclose(found, due)


@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_later_queries_and_keys(name: str, mode: str, which: str) -> None:
    found, due = rows_after_an_edit(name, mode, which)
    if "strict" in ap.METHODS[name].causality[mode] or which not in CALLS[name].reads:
        torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-6)
    else:
        # declared not to be strict, and it is not
        assert not torch.allclose(found, due, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "mode"), [pair for pair in MODES if "strict" in ap.METHODS[pair[0]].causality[pair[1]]])
def test_strict_methods_do_not_know_how_long_a_text_is(name: str, mode: str) -> None:
    """A prefix has the rows of the whole text, whatever follows: this is what decoding token by token needs."""
    tensors = inputs(TOKENS)
    whole = CALLS[name].run(*tensors.values(), mode)
    for end in (1, 7, 8, 9, 33, 64, 89):
        prefix = CALLS[name].run(*(x[:, :end] for x in tensors.values()), mode)
        torch.testing.assert_close(prefix, whole[:, :end], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_row_does_not_depend_on_its_neighbours_in_the_batch(name: str, mode: str) -> None:
    tensors = inputs(40, B=3)
    whole = CALLS[name].run(*tensors.values(), mode)
    alone = CALLS[name].run(*(x[1:2] for x in tensors.values()), mode)
    torch.testing.assert_close(alone, whole[1:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "mode"), [pair for pair in MODES if pair[0] not in ("linear", "performer", "linformer")])
def test_a_batch_of_none(name: str, mode: str) -> None:
    tensors = {n: x.requires_grad_() for n, x in inputs(20, B=0).items()}
    o = CALLS[name].run(*tensors.values(), mode)
    assert o.shape == (0, 20, 4, 8)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_the_same_call_gives_the_same_bits(name: str, mode: str) -> None:
    tensors = {n: x.requires_grad_(name != "Loki") for n, x in inputs(40).items()}
    outs = [CALLS[name].run(*tensors.values(), mode) for _ in range(2)]
    assert torch.equal(*outs)
    if name != "Loki":
        used = [x for n, x in tensors.items() if name != "reformer" or n != "k"]
        first, second = (torch.autograd.grad(o.square().sum(), used) for o in outs)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
