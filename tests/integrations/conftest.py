"""A backend of formulas, first in the order, that counts its calls, to show that Rooftile really ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import rooftile
from rooftile.exact import dispatch, reference
from rooftile.exact.spec import Grads
from rooftile.integrations.torch_sdpa import route


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Enables Rooftile and counts its runs, by "forward" and "backward"; disables it afterwards.

    The dense problems without bias run on the definition and on its gradients as formulas, in fp64.
    """
    counted: Counter = Counter()

    def refusals(spec):
        if spec.layout != "dense" or spec.has_bias or spec.dropout:
            yield "a backend of the tests; has dense problems without bias and dropout"

    def settings(options, spec):
        return {"scale": spec.scale, "softcap": spec.softcap, "alibi": options.alibi, "sinks": options.sinks}

    def forward(q, k, v, options, spec):
        counted["forward"] += 1
        q, k, v = (x.detach().double() for x in (q, k, v))
        o, lse = reference.attention(q, k, v, spec.mask, **settings(options, spec))
        return o.to(spec.dtype).contiguous(), lse.float().contiguous()

    def backward(inputs, spec):
        do, dlse, q, k, v, _, lse, options = inputs
        counted["backward"] += 1
        assert spec.needs_grad
        do, q, k, v = (x.detach().double() for x in (do, q, k, v))
        dlse = lse.new_zeros(lse.shape).double() if dlse is None else dlse.double()
        grads = reference.gradients(do, dlse, q, k, v, spec.mask, **settings(options, spec))
        return Grads(*(None if g is None else g.to(spec.dtype).contiguous() for g in grads))

    formulas = SimpleNamespace(NAME="formulas", refusals=refusals, forward=forward, backward=backward)
    monkeypatch.setattr(dispatch, "ORDER", (formulas, *dispatch.ORDER))
    monkeypatch.setattr(dispatch, "BACKENDS", {"formulas": formulas, **dispatch.BACKENDS})
    dispatch.choose.cache_clear()
    route.choose.cache_clear()
    yield counted
    rooftile.disable()
    torch._dynamo.reset()
    dispatch.choose.cache_clear()
    route.choose.cache_clear()


@pytest.fixture
def registered() -> Iterator[None]:
    """Rooftile is registered with Transformers, as after any import of both, and enabled again afterwards."""
    from rooftile.integrations import transformers as integration

    integration.register()
    integration.enable()
    yield
    integration.enable()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts the integration's calls of Rooftile: dense, with a bias, packed."""
    from rooftile.integrations import transformers as integration

    counted: Counter = Counter()
    dense, packed = integration.api.attention, integration.api.attention_packed

    def count_dense(*args, **options):
        counted["dense" if options.get("bias") is None else "bias"] += 1
        return dense(*args, **options)

    def count_packed(*args, **options):
        counted["packed"] += 1
        return packed(*args, **options)

    monkeypatch.setattr(integration.api, "attention", count_dense)
    monkeypatch.setattr(integration.api, "attention_packed", count_packed)
    return counted
