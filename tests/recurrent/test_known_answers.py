"""Recurrences that become one another, attention, or nothing, where their numbers are chosen so."""

from __future__ import annotations

import torch

import rooftile as rt
from rooftile import approximate
from rooftile import recurrent as rec
from tests.recurrent.cases import rand

B, T, H, P, N = 2, 75, 4, 5, 6


def test_ssd_without_decay_is_linear_attention() -> None:
    x, q, k = rand(B, T, H, P), rand(B, T, 1, N), rand(B, T, 1, N)
    y, state = rec.ssd(x, torch.ones(B, T, H).double(), torch.zeros(H).double(), k, q, softplus=False)
    due, (sums, _) = approximate.linear_with_state(
        q.expand(B, T, H, N), k.expand(B, T, H, N), x, rt.CAUSAL, feature="identity", normalise=False
    )
    assert torch.allclose(y, due)
    assert torch.allclose(state, sums.mT)


def test_ssd_is_a_masked_product_of_matrices() -> None:
    """The duality: y = (C B^T * L) (dt x), with L the products of decays."""
    x, dt, b, c = rand(B, T, H, P), torch.rand(B, T, H).double(), rand(B, T, 1, N), rand(B, T, 1, N)
    A = -torch.rand(H).double() - 0.1
    decay = torch.exp(dt * A)  # (B, T, H)
    L = torch.zeros(B, H, T, T).double()
    for t in range(T):
        for s in range(t + 1):
            L[:, :, t, s] = decay[:, s + 1 : t + 1].prod(1)
    scores = torch.einsum("btn,bsn->bts", c[:, :, 0], b[:, :, 0])[:, None] * L
    due = torch.einsum("bhts,bsh,bshp->bthp", scores, dt, x)
    assert torch.allclose(rec.ssd(x, dt, A, b, c, softplus=False, return_state=False), due)


def test_a_scan_whose_channels_share_their_rates_is_ssd() -> None:
    x, dt, b, c, D = rand(B, T, H, P), rand(B, T, H), rand(B, T, N), rand(B, T, N), rand(H)
    A = -torch.rand(H).double()
    due, state = rec.ssd(x, dt, A, b[:, :, None], c[:, :, None], D=D)
    y, scanned = rec.selective_scan(
        x.flatten(2), dt.repeat_interleave(P, 2), A.repeat_interleave(P)[:, None].expand(-1, N), b, c, D=D.repeat_interleave(P)
    )
    assert torch.allclose(y, due.flatten(2))
    assert torch.allclose(scanned, state.flatten(1, 2))


def test_a_scan_of_one_number_is_an_exponential_average() -> None:
    x, ones = rand(B, T, 1), torch.ones(B, T, 1).double()
    y = rec.selective_scan(x, ones * 0.3, -ones[0, :1], ones, ones, softplus=False, return_state=False)
    weights = torch.exp(-0.3 * (torch.arange(T)[:, None] - torch.arange(T))).tril().double()
    assert torch.allclose(y[..., 0], 0.3 * x[..., 0] @ weights.T)


def test_the_delta_rule_that_writes_nothing_is_nothing() -> None:
    q, k, v = rand(B, T, H, N), rand(B, T, H, N), rand(B, T, H, P)
    y, state = rec.gated_delta(q, k, v, torch.zeros(B, T, H).double(), torch.zeros(B, T, H).double())
    assert not y.any()
    assert not state.any()


def test_the_delta_rule_with_keys_at_right_angles_is_gated_linear_attention() -> None:
    """A key recalls nothing, so nothing is taken out: SSD with a step of 1, keys B, queries C."""
    T = N
    k = torch.linalg.qr(rand(B, H, N, N)).Q.transpose(1, 2)  # the T keys of a head
    q, v, g, beta = rand(B, T, H, N), rand(B, T, H, P), -torch.rand(B, T, H).double(), torch.rand(B, T, H).double()
    y, state = rec.gated_delta(q, k, v, g, beta, scale=1.0, qk_norm=False)
    A = -torch.ones(H).double()
    # dt A is g; the factor dt of x is taken out again
    due, last = rec.ssd(v * (beta / -g)[..., None], -g, A, k, q, softplus=False)
    assert torch.allclose(y, due)
    assert torch.allclose(state, last.mT)


def test_the_delta_rule_recalls_what_it_has_written() -> None:
    """DeltaNet, a = 1: with beta = 1 the value that was written last under a key of length 1 is what this key recalls."""
    k = torch.nn.functional.normalize(rand(B, T, H, N), dim=-1)
    v, ones = rand(B, T, H, P), torch.ones(B, T, H).double()
    y = rec.gated_delta(k, k, v, 0 * ones, ones, scale=1.0, qk_norm=False, return_state=False)
    assert torch.allclose(y, v)


def test_decays_of_all_channels_alike_are_decays_of_the_head() -> None:
    q, k, v = rand(B, T, 2, N), rand(B, T, 2, N), rand(B, T, H, P)
    g, beta = -torch.rand(B, T, H).double(), torch.rand(B, T, H).double()
    due, state = rec.gated_delta(q, k, v, g, beta)
    y, last = rec.gated_delta(q, k, v, g[..., None].expand(B, T, H, N), beta)
    assert torch.allclose(y, due)
    assert torch.allclose(last, state)


def test_a_convolution_of_one_tap_is_a_product_and_of_a_late_tap_a_delay() -> None:
    x, weight = rand(B, T, P), rand(P, 4)
    one = torch.zeros(P, 4).double()
    one[:, 3] = weight[:, 0]
    assert torch.allclose(rec.causal_conv(x, one, activation=None, return_tail=False), x * weight[:, 0])
    late = torch.zeros(P, 4).double()
    late[:, 1] = 1.0
    y, tail = rec.causal_conv(x, late, activation=None)
    assert torch.equal(y[:, 2:], x[:, :-2])
    assert not y[:, :2].any()
    assert torch.equal(tail, x[:, -3:].mT)
    # a call with fewer tokens than the tail keeps older ones
    _, longer = rec.causal_conv(x[:, :1], late, tail=tail)
    assert torch.equal(longer, torch.cat((tail[..., 1:], x[:, 0, :, None]), -1))


def test_what_lies_behind_steps_of_nothing_is_not_seen() -> None:
    """A step of 0 neither reads its token nor decays the state: padding."""
    x, dt, b, c = rand(B, T, H, P), torch.rand(B, T, H).double(), rand(B, T, 1, N), rand(B, T, 1, N)
    A = -torch.rand(H).double() - 0.1
    _, due = rec.ssd(x[:, :50], dt[:, :50], A, b[:, :50], c[:, :50], softplus=False)
    dt[:, 50:] = 0.0
    _, state = rec.ssd(x, dt, A, b, c, softplus=False)
    assert torch.allclose(state, due)
