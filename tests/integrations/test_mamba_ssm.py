"""mamba-ssm's and causal-conv1d's names, beside the loops over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rooftile.errors import InvalidInput, Unsupported
from rooftile.integrations import mamba_ssm as ours
from tests.recurrent import definitions
from tests.recurrent.cases import rand

B, L, W, N, H, P, G = 2, 9, 6, 3, 4, 5, 2


def close(found: Tensor, due: Tensor) -> None:
    assert found.shape == due.shape
    assert torch.allclose(found, due, atol=1e-10)


def scan_tensors() -> tuple[Tensor, ...]:
    return rand(B, W, L), rand(B, W, L), -torch.rand(W, N).double() - 0.1, rand(B, N, L), rand(B, N, L)


def test_selective_scan_fn_and_gradients_through_its_last_state() -> None:
    u, delta, A, b, c = scan_tensors()
    D, z, bias = rand(W), rand(B, W, L), rand(W)
    due, last = definitions.selective_scan(u.mT, delta.mT, A, b.mT, c.mT, D=D, z=z.mT, dt_bias=bias)
    found = ours.selective_scan_fn(u, delta, A, b, c, D, z, bias, delta_softplus=True, return_last_state=True)
    close(found[0], due.mT)
    close(found[1], last)
    close(ours.selective_scan_fn(u, delta, A, b[:, None], c[:, None], D, z, bias, delta_softplus=True), due.mT)
    u.requires_grad_()
    state = ours.selective_scan_fn(u, delta, A, b, c, None, None, bias, True, True)[1]
    assert torch.autograd.grad(state.sum(), u)[0].abs().sum() > 0


def ssd_tensors(batch: int = B, length: int = L) -> tuple[Tensor, ...]:
    b, c = rand(2, batch, length, G, N).unbind()
    return rand(batch, length, H, P), rand(batch, length, H), -torch.rand(H).double() - 0.1, b, c


def test_mamba_chunk_scan_combined() -> None:
    given, options = ssd_tensors(), {"D": rand(H), "z": rand(B, L, H, P), "dt_bias": rand(H)}
    first = torch.randn(B, H, P, N)
    narrow = [x.float() for x in given]
    due, last = definitions.ssd(*given, state=first.double(), **options)
    y, state = ours.mamba_chunk_scan_combined(
        *narrow, 4, initial_states=first, dt_softplus=True, return_final_states=True,
        **{name: x.float() for name, x in options.items()},
    )  # fmt: skip
    assert torch.allclose(y.double(), due, atol=1e-4)
    assert torch.allclose(state.double(), last, atol=1e-4)
    given = given[0], given[1].abs(), *given[2:]
    sums = ours.mamba_chunk_scan_combined(*given, 4)
    close(sums, definitions.ssd(*given, softplus_on=False)[0])


def test_packed_sequences_by_numbers_and_by_offsets() -> None:
    given = ssd_tensors(1, 11)
    cu = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    numbers = torch.tensor([[0, 0, 0, 0, 3, 7, 7, 7, 7, 7, 7]], dtype=torch.int32)
    flat = [x if n == 2 else x[0] for n, x in enumerate(given)]
    due, states = definitions.ssd(*flat, cu=cu)
    close(ours.mamba_chunk_scan_combined(*given, 4, seq_idx=numbers, dt_softplus=True), due[None])
    y, last, each = ours.mamba_chunk_scan_combined(
        *given, 4, cu_seqlens=cu, dt_softplus=True, return_final_states=True, return_varlen_states=True
    )
    close(y, due[None])
    close(last, states[-1:])
    close(each, states)


@pytest.mark.parametrize("alike", [True, False])
def test_selective_state_update_with_heads(alike: bool) -> None:
    x, z = rand(2, B, H, P).unbind()
    b, c = rand(2, B, G, N).unbind()
    if alike:
        dt, A, bias = rand(B, H, 1).expand(B, H, P), -torch.rand(H, 1, 1).double().expand(H, P, N), rand(H, 1).expand(H, P)
    else:
        dt, A, bias = rand(B, H, P), -torch.rand(H, P, N).double(), rand(H, P)
    D, state = rand(H, P), rand(5, H, P, N)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    before = state.clone()
    y = ours.selective_state_update(state, x, dt, A, b, c, D, z, bias, True, slots)
    for n, slot in enumerate(slots.tolist()):
        step = definitions.softplus(dt[n] + bias)
        own_b, own_c = (part[n].repeat_interleave(H // G, 0)[:, None] for part in (b, c))
        due = torch.exp(step[..., None] * A) * before[slot] + (step * x[n])[..., None] * own_b
        close(state[slot], due)
        close(y[n], ((due * own_c).sum(-1) + D * x[n]) * definitions.silu(z[n]))
    assert torch.equal(state[[0, 2, 4]], before[[0, 2, 4]])


def test_selective_state_update_of_channels() -> None:
    u, delta, A, b, c = scan_tensors()
    state = torch.zeros(B, W, N).double()
    due, last = definitions.selective_scan(u.mT, delta.mT, A, b.mT, c.mT)
    for t in range(L):
        y = ours.selective_state_update(state, u[..., t], delta[..., t], A, b[..., t], c[..., t], dt_softplus=True)
        close(y, due[:, t])
    close(state, last)


def test_causal_conv1d() -> None:
    x, weight, bias, first = rand(B, W, L), rand(W, 4), rand(W), rand(B, W, 3)
    due, tail = definitions.causal_conv(x.mT, weight, bias, tail=first)
    y, last = ours.causal_conv1d_fn(x, weight, bias, None, first, True, activation="silu")
    close(y, due.mT)
    close(last, tail)
    numbers = torch.tensor([[0] * 4 + [1] * 5, [2] * 9], dtype=torch.int32)
    y = ours.causal_conv1d_fn(x, weight, bias, numbers)
    for row, cu in enumerate(([0, 4, 9], [0, 9])):
        close(y[row], definitions.causal_conv(x[row].mT, weight, bias, activation=None, cu=torch.tensor(cu))[0].mT)


@pytest.mark.parametrize("columns", [3, 4, 6])
@pytest.mark.parametrize("slots", [None, torch.tensor([4, 0], dtype=torch.int32)])
def test_causal_conv1d_update(columns: int, slots: Tensor | None) -> None:
    x, weight, bias = rand(B, W, L), rand(W, 4), rand(W)
    rows = [0, 1] if slots is None else slots.tolist()
    state = rand(B if slots is None else 5, W, columns)
    due, tail = definitions.causal_conv(x.mT, weight, bias, tail=state[rows][..., columns - 3 :])
    first = ours.causal_conv1d_update(x[..., 0], state, weight, bias, "silu", conv_state_indices=slots)
    rest = ours.causal_conv1d_update(x[..., 1:], state, weight, bias, "silu", conv_state_indices=slots)
    close(torch.cat((first[..., None], rest), -1), due.mT)
    close(state[rows][..., columns - 3 :], tail)


def test_layers_take_the_words_of_mamba_ssm() -> None:
    torch.manual_seed(0)
    assert ours.Mamba(32, d_state=8, d_conv=3, expand=2, layer_idx=1)(torch.randn(1, 5, 32)).shape == (1, 5, 32)
    layer = ours.Mamba2(d_model=32, d_state=8, headdim=16, ngroups=2, chunk_size=64)
    assert layer(torch.randn(1, 5, 32)).shape == (1, 5, 32)
    assert layer.A_log.shape == (4,)
    # by place, in mamba-ssm's order
    layer = ours.Mamba2(32, 8, 4, 0.25, 2, 16, None, 1, (2, 3), False, True, False, 0.01, 0.02, 1e-4, (0.0, 1.0))
    assert layer.conv1d.weight.abs().max() <= 0.25
    assert layer.dt_limit == (0.0, 1.0)
    for low, x, high in ((2, layer.A_log.exp(), 3), (0.01, nn.functional.softplus(layer.dt_bias), 0.02)):
        assert ((low - 1e-5 <= x) & (x <= high + 1e-5)).all()
    layer = ours.Mamba(32, 8, 4, 2, "auto", 0.01, 0.02, "constant", 0.5, 1e-4, True, False, True, 1)
    assert layer.layer_idx == 1
    assert (layer.dt_proj.weight == 0.5 * 2**-0.5).all()
    steps = nn.functional.softplus(layer.dt_proj.bias)
    assert ((steps >= 0.01 - 1e-5) & (steps <= 0.02 + 1e-5)).all()


def test_a_layer_takes_rows_and_packed_sequences() -> None:
    torch.manual_seed(1)
    layer, u = ours.Mamba2(32, d_state=8, headdim=16), torch.randn(2, 9, 32)
    close(layer(u.flatten(0, 1), seqlen=9), layer(u).flatten(0, 1))
    apart = torch.cat((layer(u[:1, :4]), layer(u[:1, 4:])), 1)
    close(layer(u[:1], seq_idx=torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32)), apart)
    close(layer(u[:1], cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32)), apart)
    close(layer(u[0], 9, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32)), apart[0])


def test_refusals() -> None:
    u, delta, A, b, c = scan_tensors()
    x, dt, rates, heads_b, heads_c = ssd_tensors()
    for error, words, run in (
        (Unsupported, "A is torch.complex128; has real", lambda: ours.selective_scan_fn(u, delta, A + 0j, b, c)),
        (Unsupported, "the same for all tokens", lambda: ours.selective_scan_fn(u, delta, A, b[0], c)),
        (Unsupported, "in a batch of 2; has a batch of 1", lambda: ours.mamba_chunk_scan_combined(
            x, dt, rates, heads_b, heads_c, 4, cu_seqlens=torch.tensor([0, 9]))),
        (InvalidInput, "return_varlen_states is True and cu_seqlens is None", lambda: ours.mamba_chunk_scan_combined(
            x, dt, rates, heads_b, heads_c, 4, return_varlen_states=True)),
        (InvalidInput, "seq_idx falls somewhere", lambda: ours.mamba_chunk_scan_combined(
            x[:1], dt[:1], rates, heads_b[:1], heads_c[:1], 4, seq_idx=torch.tensor([[1] * 4 + [0] * 5]))),
        (Unsupported, "cache_seqlens makes conv_state circular", lambda: ours.causal_conv1d_update(
            u[..., 0], torch.zeros(B, W, 3), rand(W, 4), cache_seqlens=torch.zeros(2))),
        (Unsupported, "norm_before_gate=True", lambda: ours.Mamba2(32, norm_before_gate=True)),
        (Unsupported, "d_ssm=32 and process_group=None; has", lambda: ours.Mamba2(32, headdim=16, d_ssm=32)),
        (InvalidInput, "dt_min is 0.2 and dt_max 0.1; must be", lambda: ours.Mamba2(32, headdim=16, dt_min=0.2)),
        (InvalidInput, r"A_init_range is \(0, 1\); must be", lambda: ours.Mamba2(32, headdim=16, A_init_range=(0, 1))),
        (InvalidInput, "dt_init is 'zero'; must be 'random' or 'constant'", lambda: ours.Mamba(32, dt_init="zero")),
        (Unsupported, "inference_params; write y, state", lambda: ours.Mamba(32)(torch.randn(1, 2, 32), inference_params={})),
        (Unsupported, r"packed sequences in u \(2, 2, 32\); has a batch of 1", lambda: ours.Mamba2(32, headdim=16)(
            torch.randn(2, 2, 32), cu_seqlens=torch.tensor([0, 4]))),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            run()
