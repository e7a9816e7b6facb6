"""The forward: states of segments where a sequence is cut, then the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recurrent.kernels.copies import token_box
from rooftile.recurrent.kernels.state_space.call import Call, Launch, some
from rooftile.recurrent.kernels.state_space.outputs import _outputs
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

_start_outputs = Kernel(_outputs)


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns y in the dtype of x, or in another one, and the last states."""
    call = Call(tokens, constants, state, cu, options)
    x, state = call.x, state.contiguous()
    y = call.floats(f"y {dtype}", *x.shape, dtype=dtype or x.dtype)
    # a sequence without tokens keeps its state
    last = state.clone() if call.packed or not call.T else call.floats("last", *state.shape, dtype=state.dtype)
    if not y.numel() or not state.numel():
        return y.zero_(), last
    call.prepare()
    start = call.starts(state, x)
    if call.z is None and call.H // call.G % 2 == 0 and call.suits_warpgroups(y):
        from rooftile.recurrent.kernels.state_space.launch_hopper import write_outputs

        write_outputs(call, start, y, last)
        return y, last
    z = x if call.z is None else call.z
    tensors = (x, call.B, call.C, y, z, call.skip, call.cb, call.step, call.total, start, last, call.cu)
    call.start(("outputs", y.dtype), tensors, lambda: _launch(call))
    return y, last


def _launch(call: Call) -> Launch:
    numbers = (
        call.strides(call.x), call.strides(call.B), call.strides(call.C), call.strides(call.z), call.skip_strides, *call.sizes,
        call.slots,
    )  # fmt: skip
    own = some(_start_outputs, call.key, GATED=call.z is not None, SKIP=call.D is not None, WHOLE=call.whole)
    of_x, of_rows = token_box(call.block, call.columns), token_box(call.block, call.numbers)
    return Launch(_start_outputs, (call.slots, call.H, call.parts), numbers, own, (of_x, of_rows, of_rows, of_x))
