"""A call of each recurrence over a state, of its backward and of its step, with its work counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rooftile.cost.counts import Work
from rooftile.recurrent import convolution, delta, selective, state_space

# 2 sequences of 3 tokens; 4 heads of 8 numbers, 2 groups, and 16 numbers of state for each
_X, _DT, _B, _STATE = 2 * 3 * 4 * 8 * 4, 2 * 3 * 4 * 4, 2 * 3 * 2 * 16 * 4, 2 * 4 * 8 * 16 * 4
_A = 4 * 4


def _ssd_tensors(device: torch.device, tokens: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    x, dt = torch.randn(*tokens, 4, 8, device=device), torch.randn(*tokens, 4, device=device)
    B, C = torch.randn(2, *tokens, 2, 16, device=device).unbind()
    return [x, dt, -torch.rand(4, device=device) - 0.1, B, C]


def _ssd(device: torch.device, backward: bool = False) -> Work:
    tensors = [x.requires_grad_(backward) for x in _ssd_tensors(device)]
    y, state = state_space.ssd(*tensors)
    if not backward:
        return Work(2 * 2 * 2 * 3 * 4 * 8 * 16, _X + _DT + _A + 2 * _B + _STATE, _X + _STATE)
    (y.sum() + state.sum()).backward()
    read = 2 * _X + _DT + _A + 2 * _B + 2 * _STATE
    return Work(2 * 5 * 2 * 3 * 4 * 8 * 16, read, _X + _DT + _A + 2 * _B + _STATE)


def _ssd_step(device: torch.device) -> Work:
    # 2 of 5 rows are touched; the slots take 8 bytes
    state, slots = torch.zeros(5, 4, 8, 16, device=device), torch.tensor([4, 1], dtype=torch.int32, device=device)
    state_space.ssd_step(state, *_ssd_tensors(device, (2,)), slots=slots)
    read = (_X + _DT + 2 * _B) // 3 + _A + _STATE + 8
    return Work(2 * 2 * 2 * 4 * 8 * 16, read, _X // 3 + _STATE)


def _scan_tensors(device: torch.device, tokens: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    x, dt = torch.randn(2, *tokens, 8, device=device).unbind()
    B, C = torch.randn(2, *tokens, 4, device=device).unbind()
    return [x, dt, -torch.rand(8, 4, device=device) - 0.1, B, C]


def _scan(device: torch.device, backward: bool = False) -> Work:
    x, b, a, state = 2 * 3 * 8 * 4, 2 * 3 * 4 * 4, 8 * 4 * 4, 2 * 8 * 4 * 4
    tensors = [t.requires_grad_(backward) for t in _scan_tensors(device)]
    y, last = selective.selective_scan(*tensors)
    if not backward:
        return Work(0, 2 * x + 2 * b + a + state, x + state)
    (y.sum() + last.sum()).backward()
    return Work(0, 3 * x + 2 * b + a + 2 * state, 2 * x + 2 * b + a + state)


def _scan_step(device: torch.device) -> Work:
    state = torch.zeros(2, 8, 4, device=device)
    selective.selective_scan_step(state, *_scan_tensors(device, (2,)))
    return Work(0, 2 * 64 + 2 * 32 + 128 + 256, 64 + 256)


def _conv(device: torch.device, backward: bool = False) -> Work:
    x, weight, tail = 2 * 3 * 8 * 4, 8 * 4 * 4, 2 * 8 * 3 * 4
    tensors = [t.requires_grad_(backward) for t in (torch.randn(2, 3, 8, device=device), torch.randn(8, 4, device=device))]
    y, last = convolution.causal_conv(*tensors)
    if not backward:
        return Work(0, x + weight + tail, x + tail)
    (y.sum() + last.sum()).backward()
    return Work(0, 2 * x + weight + 2 * tail, x + weight + tail)


def _conv_step(device: torch.device) -> Work:
    convolution.conv_step(torch.zeros(2, 8, 3, device=device), torch.randn(2, 8, device=device), torch.randn(8, 4, device=device))
    return Work(0, 64 + 128 + 192, 64 + 192)


def _delta_tensors(device: torch.device, tokens: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    q, k = torch.randn(2, *tokens, 2, 8, device=device).unbind()
    v = torch.randn(*tokens, 4, 16, device=device)
    return [q, k, v, -torch.rand(*tokens, 4, device=device), torch.rand(*tokens, 4, device=device)]


def _delta(device: torch.device, backward: bool = False) -> Work:
    q, v, g, state = 2 * 3 * 2 * 8 * 4, 2 * 3 * 4 * 16 * 4, 2 * 3 * 4 * 4, 2 * 4 * 8 * 16 * 4
    tensors = [t.requires_grad_(backward) for t in _delta_tensors(device)]
    y, last = delta.gated_delta(*tensors)
    if not backward:
        return Work(2 * 3 * 2 * 3 * 4 * 8 * 16, 2 * q + v + 2 * g + state, v + state)
    (y.sum() + last.sum()).backward()
    return Work(2 * 8 * 2 * 3 * 4 * 8 * 16, 2 * q + 2 * v + 2 * g + 2 * state, 2 * q + v + 2 * g + state)


def _delta_step(device: torch.device) -> Work:
    delta.gated_delta_step(torch.zeros(2, 4, 8, 16, device=device), *_delta_tensors(device, (2,)))
    state, q, v, g = 2 * 4 * 8 * 16 * 4, 2 * 2 * 8 * 4, 2 * 4 * 16 * 4, 2 * 4 * 4
    return Work(2 * 3 * 2 * 4 * 8 * 16, 2 * q + v + 2 * g + state, v + state)


STATE_CALLS: dict[str, Callable[[torch.device], Work]] = {
    "ssd": _ssd, "ssd_backward": partial(_ssd, backward=True), "ssd_step": _ssd_step,
    "selective_scan": _scan, "selective_scan_backward": partial(_scan, backward=True), "selective_scan_step": _scan_step,
    "causal_conv": _conv, "causal_conv_backward": partial(_conv, backward=True), "causal_conv_step": _conv_step,
    "gated_delta": _delta, "gated_delta_backward": partial(_delta, backward=True), "gated_delta_step": _delta_step,
}  # fmt: skip
