"""Temporary: the operators of `rooftile.recurrent`, token by token."""

import math

import torch
from torch.nn.functional import silu
from torch.nn.functional import softplus as soft


def conv_step(tail, x, weight, bias, activation="silu", slots=None):
    rows = slice(None) if slots is None else slots
    window = torch.cat([tail[rows], x[:, :, None]], -1)
    tail[rows] = window[:, :, 1:]
    y = (window * weight).sum(-1)
    y = y if bias is None else y + bias
    return silu(y)


def causal_conv(x, weight, bias, activation="silu", tail=None, return_tail=True, cu=None):
    tails = tail.clone()
    y = torch.empty_like(x)
    cu = cu.tolist()
    for n in range(len(cu) - 1):
        for t in range(cu[n], cu[n + 1]):
            y[t : t + 1] = conv_step(tails[n : n + 1], x[t : t + 1], weight, bias)
    return y, tails


def ssd_step(state, x, dt, A, B, C, D=None, dt_bias=None, softplus=True, dt_limit=(0.0, math.inf), slots=None):
    rows = slice(None) if slots is None else slots
    H, G = x.shape[1], B.shape[1]
    B, C = (t.float().repeat_interleave(H // G, 1) for t in (B, C))
    d = soft(dt.float() + dt_bias).clamp(*dt_limit)
    S = state[rows] * (d * A).exp()[..., None, None] + (d[..., None] * x.float())[..., None] * B[:, :, None]
    state[rows] = S
    y = (S * C[:, :, None]).sum(-1) + D[:, None] * x.float()
    return y.to(x.dtype)


def ssd(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, softplus=True, dt_limit=(0.0, math.inf), state=None, return_state=True, cu=None
):
    states = state.clone()
    y = torch.empty_like(x)
    cu = cu.tolist()
    for n in range(len(cu) - 1):
        for t in range(cu[n], cu[n + 1]):
            one = slice(t, t + 1)
            y[one] = ssd_step(states[n : n + 1], x[one], dt[one], A, B[one], C[one], D, dt_bias, True, dt_limit)
    return y, states


def selective_scan_step(state, x, dt, A, B, C, D=None, dt_bias=None, softplus=True, slots=None):
    rows = slice(None) if slots is None else slots
    d = soft(dt.float() + dt_bias)[..., None]
    S = state[rows] * (d * A).exp() + d * x.float()[..., None] * B.float()[:, None]
    state[rows] = S
    return ((S * C.float()[:, None]).sum(-1) + D * x.float()).to(x.dtype)


def selective_scan(x, dt, A, B, C, D=None, dt_bias=None, softplus=True, state=None, cu=None):
    states = state.clone()
    y = torch.empty_like(x)
    cu = cu.tolist()
    for n in range(len(cu) - 1):
        for t in range(cu[n], cu[n + 1]):
            one = slice(t, t + 1)
            y[one] = selective_scan_step(states[n : n + 1], x[one], dt[one], A, B[one], C[one], D, dt_bias)
    return y, states
