"""The recurrence in Triton kernels, for Ampere and newer: head dims up to 128.

    call         the sizes and tiles of a call
    states       the state that each segment starts from; features of the head's own dimensions
    outputs      each segment walked from its state
    gradients    the same for gradients
    ends         sums behind keys, and their gradients, without outputs
    by_features  exponential features of a projection, which have a running largest: their launches
    exponents, exponential, exponential_gradients   their kernels
    tiles        what they share

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.kernels import by_features
from rooftile.recurrent.linear.kernels.call import Call, readable
from rooftile.recurrent.linear.kernels.ends import begin, end
from rooftile.recurrent.linear.kernels.gradients import _key_or_value_gradients, _query_gradients, row_gradients
from rooftile.recurrent.linear.kernels.outputs import _outputs
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.runtime.launch import Kernel

__all__ = ["backward", "begin", "end", "forward"]

_start_outputs, _start_queries, _start_keys_or_values = map(Kernel, (_outputs, _query_gradients, _key_or_value_gradients))


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, cu: Tensor | None, problem: Recurrence
) -> tuple[Tensor, Tensor, RunningSums]:
    """o (B, T, H, Dv) in the dtype of q, the sums of weights (B, T, H), and the last state."""
    if projection is not None:
        return by_features.forward(q, k, v, state, projection, cu, problem)
    q, k, v = (readable(x) for x in (q, k, v))
    call = Call(q, k, v, cu, problem)
    o = torch.empty((*q.shape[:-1], call.dim_v), dtype=q.dtype, device=q.device)
    den = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    part, lost, last = call.states(k, v, None, None, state, False)
    slots = call.slots(call.T)
    if slots and o.numel():
        constants = call.constants("outputs", FEATURE=problem.feature, CAUSAL=problem.causal, NORMALISE=problem.normalise)
        s, z = call.starts(part, last)
        arguments = (
            q, k, v, o, den, s, z, lost, call.cu, call.strides(q), call.strides(k), call.strides(v), call.T, call.B,
        )  # fmt: skip
        _start_outputs((slots, call.H, triton.cdiv(call.dim_v, constants["BLOCK_V"])), arguments, constants)
    return o, den, last


def backward(
    do: Tensor, d_last: RunningSums, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, cu: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, S and z."""
    if projection is not None:
        return by_features.backward(do, d_last, o, den, q, k, v, state, projection, cu, problem)
    q, k, v = (readable(x) for x in (q, k, v))
    do, o, den = do.contiguous(), o.contiguous(), den.contiguous()
    call = Call(q, k, v, cu, problem)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    weight, unit = row_gradients(do, o, den) if problem.normalise else (torch.ones_like(den), torch.zeros_like(den))
    past, lost_k, last = call.states(k, v, None, None, state, False)
    later, lost_q, first = call.states(q, do, weight, unit, RunningSums(d_last.s, d_last.z, state.largest), True)
    strides = (call.strides(q), call.strides(k), call.strides(v))
    options = {"FEATURE": problem.feature, "CAUSAL": problem.causal}
    slots, slots_k = call.slots(call.T), call.slots(call.S)
    if slots and dq.numel():
        constants = call.constants("queries", **options)
        arguments = (q, k, v, do, weight, unit, dq, *call.starts(past, last), lost_k, call.cu, *strides, call.T, call.B)
        _start_queries((slots, call.H, triton.cdiv(call.dim, constants["BLOCK_D"])), arguments, constants)
    if slots_k and dk.numel():
        starts = (*call.starts(later, first), lost_q, call.cu, *strides, call.S, call.B)
        for kernel, dx, width, block in (("keys", dk, call.dim, "BLOCK_D"), ("values", dv, call.dim_v, "BLOCK_V")):
            constants = call.constants(kernel, KEYS=kernel == "keys", **options)
            grid = (slots_k, call.Hk, triton.cdiv(width, constants[block]))
            _start_keys_or_values(grid, (q, k, v, do, weight, unit, dx, *starts), constants)
    return dq, dk, dv, first.s, first.z
