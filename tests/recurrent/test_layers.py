"""Layers with a recurrence beside Transformers' mixers with the same weights; states, packed sequences, steps, first values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rooftile as rt
from rooftile.errors import InvalidInput, Unsupported
from rooftile.recurrent.modules.parts import RecurrentState

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "mamba": partial(rt.nn.Mamba, 24, state_size=5),
    "mamba2": partial(rt.nn.Mamba2, 24, head_dim=8, state_size=6, groups=2),
    "delta": partial(rt.nn.GatedDeltaNet, 24, key_heads=2, value_heads=4, key_dim=6, value_dim=5),
}
every = pytest.mark.parametrize("name", list(LAYERS))


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


@pytest.mark.parametrize(("groups", "together"), [(1, False), (2, True)])
def test_mamba_2_is_transformers(groups: int, together: bool) -> None:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

    config = Mamba2Config(
        hidden_size=24, num_heads=6, head_dim=8, state_size=6, n_groups=groups, expand=2, chunk_size=4, use_conv_bias=True,
        layer_norm_epsilon=1e-5,
    )  # fmt: skip
    torch.manual_seed(1)
    due = Mamba2Mixer(config, layer_idx=0)
    for parameter in due.parameters():
        nn.init.normal_(parameter, std=0.4)
    layer = rt.nn.Mamba2(24, head_dim=8, state_size=6, groups=groups, norm_groups=not together)
    layer.load_state_dict(due.state_dict())
    x = torch.randn(2, 11, 24)
    with torch.no_grad():
        assert torch.allclose(layer(x), due(x), atol=2e-5)


def test_mamba_1_is_transformers() -> None:
    from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

    torch.manual_seed(1)
    due = MambaMixer(MambaConfig(hidden_size=24, state_size=5, expand=2, time_step_rank=2), layer_idx=0)
    for parameter in due.parameters():
        nn.init.normal_(parameter, std=0.4)
    layer = rt.nn.Mamba(24, state_size=5)
    layer.load_state_dict(due.state_dict())
    x = torch.randn(2, 11, 24)
    with torch.no_grad():
        assert torch.allclose(layer(x), due(x), atol=2e-5)


def test_the_gated_delta_net_is_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=12, intermediate_size=32, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(1)
    due = Qwen3_5GatedDeltaNet(config, 0)
    for parameter in due.parameters():
        nn.init.normal_(parameter, std=0.4)
    layer = rt.nn.GatedDeltaNet(24, key_heads=2, value_heads=4, key_dim=6, value_dim=5)
    layer.load_state_dict(due.state_dict())
    x = torch.randn(2, 70, 24)
    with torch.no_grad():
        assert torch.allclose(layer(x), due(x), atol=2e-5)


@every
def test_a_layer_goes_on_from_its_state_and_steps_are_its_rows(name: str) -> None:
    layer, x = made(name), torch.randn(2, 20, 24, dtype=torch.float64)
    due, last = layer.with_state(x)
    first, state = layer.with_state(x[:, :2])
    assert isinstance(state, RecurrentState)
    parts = [first]
    part, state = layer.with_state(x[:, 2:9], state)
    parts.append(part)
    for t in range(9, 20):
        parts.append(layer.step(x[:, t], state)[:, None])
    assert torch.allclose(torch.cat(parts, 1), due)
    assert all(torch.allclose(a, b) for a, b in zip(state, last, strict=True))


@every
def test_packed_sequences_and_gradients_through_the_state(name: str) -> None:
    layer, x = made(name), torch.randn(20, 24, dtype=torch.float64)
    cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    y, state = layer.with_state(x, cu=cu)
    for b, (first, last) in enumerate([(0, 7), (7, 7), (7, 20)]):
        own, own_state = layer.with_state(x[None, first:last])
        assert torch.allclose(y[first:last], own[0])
        assert all(torch.allclose(a[b], o[0]) for a, o in zip(state, own_state, strict=True))

    def through(x: Tensor, *state: Tensor) -> Tensor:
        return layer.with_state(x, RecurrentState(*state))[0]

    given = [torch.randn(1, 3, 24, dtype=torch.float64), *(torch.randn_like(s[:1]) for s in state)]
    assert torch.autograd.gradcheck(through, [t.requires_grad_() for t in given], atol=1e-5)


@every
def test_first_values(name: str) -> None:
    torch.manual_seed(2)
    layer = LAYERS[name]()
    assert layer(torch.randn(2, 9, 24)).isfinite().all()
    kept = {n for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert {"A_log"} < kept
    bias = layer.dt_proj.bias if name == "mamba" else layer.dt_bias
    steps = nn.functional.softplus(bias.detach())
    assert (steps >= 1e-4 - 1e-7).all()
    assert (steps <= 0.1 + 1e-6).all()
    if name == "mamba":
        assert torch.allclose(layer.A_log.exp(), torch.arange(1.0, 6.0).expand(48, 5))
    else:
        assert (layer.A_log.exp() >= (0 if name == "delta" else 1)).all()
        assert (layer.A_log.exp() <= 16).all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_layers_and_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer, x = LAYERS[name](), torch.randn(2, 9, 24)
    due = layer(x)
    with torch.autocast("cpu", dtype):
        found = layer(x)
    assert found.dtype == dtype
    assert (found.float() - due).abs().max() < 0.05 * due.abs().max()
    narrow = layer.to(dtype)
    y, state = narrow.with_state(x.to(dtype))
    assert (y.dtype, state.tail.dtype, state.state.dtype) == (dtype, dtype, torch.float32)
    assert (y.float() - due).abs().max() < 0.05 * due.abs().max()
    assert narrow.step(x[:, 0].to(dtype), state).dtype == dtype


def test_sizes_that_do_not_go_together() -> None:
    with pytest.raises(InvalidInput, match="expand dim is 48, head_dim 7 and groups 1; the second must divide the first"):
        rt.nn.Mamba2(24, head_dim=7)
    with pytest.raises(InvalidInput, match="value_heads is 4 and key_heads is 3; value_heads must be a multiple of key_heads"):
        rt.nn.GatedDeltaNet(24, key_heads=3, value_heads=4)
    with pytest.raises(InvalidInput, match="state_size is 0; must be an int of at least 1"):
        rt.nn.Mamba(24, state_size=0)
    for change, words in (
        ({"backend": "cuda"}, "backend is 'cuda'; must be 'auto'"),
        ({"dt_limit": (1.0, 0.5)}, r"dt_limit is \(1.0, 0.5\); must be two numbers from 0 on"),
        ({"eps": "small"}, "eps is 'small'; must be a finite number"),
        ({"bias": 1}, "bias is 1; must be True or False"),
        ({"conv_bias": 1}, "conv_bias is 1; must be True or False"),
    ):
        with pytest.raises(InvalidInput, match=words):
            rt.nn.Mamba2(24, head_dim=8, **change)


def test_sizes_of_numpy() -> None:
    layer = rt.nn.Mamba2(np.int64(24), head_dim=np.int32(8), state_size=np.int16(4))
    assert [type(x) for x in (layer.dim, layer.head_dim, layer.state_size, layer.heads)] == [int] * 4
    assert layer(torch.randn(1, 3, 24)).shape == (1, 3, 24)
    assert rt.nn.Mamba(24, rank=np.int64(3)).rank == 3


@every
@pytest.mark.parametrize("by_default", [False, True])
def test_layers_of_float64(name: str, by_default: bool) -> None:
    words = {} if by_default else {"dtype": torch.float64}
    torch.set_default_dtype(torch.float64 if by_default else torch.float32)
    try:
        layer = LAYERS[name](**words)
        x = torch.randn(1, 4, 24, dtype=torch.float64)
        y, state = layer.with_state(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in (y, *state, *layer.parameters())} == {torch.float64}
    assert {p.dtype for n, p in LAYERS[name](dtype=torch.bfloat16).named_parameters() if "A_log" in n} == {torch.float32}


@every
def test_derivatives_of_derivatives(name: str) -> None:
    torch.manual_seed(4)
    x = torch.randn(1, 3, 24, dtype=torch.float64, requires_grad=True)
    layer = LAYERS[name](dtype=torch.float64, backend="eager")
    assert torch.autograd.gradgradcheck(lambda x: layer(x).sin(), x)
    (dx,) = torch.autograd.grad(LAYERS[name](dtype=torch.float64)(x).sin().sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="double backward through causal_conv; backend='eager' has it"):
        dx.sum().backward()
