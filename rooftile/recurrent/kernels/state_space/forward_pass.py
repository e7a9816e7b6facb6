"""The forward: states of segments where a sequence is cut, then the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recurrent.kernels.copies import token_box
from rooftile.recurrent.kernels.state_space.call import Call, some
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
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    # a sequence without tokens keeps its state
    last = state.clone() if call.packed or not call.T else torch.empty_like(state)
    if not y.numel() or not state.numel():
        return y.zero_(), last
    call.prepare()
    start = call.starts(state, x)
    if call.suits_warpgroups(y) and call.z is None and call.H // call.G % 2 == 0:
        from rooftile.recurrent.kernels.state_space.launch_hopper import write_outputs

        write_outputs(call, start, y, last)
        return y, last
    skip, d_strides = call.skip
    own = some(_start_outputs, call.key, GATED=call.z is not None, SKIP=call.D is not None, WHOLE=call.whole)
    arguments = (
        x, call.B, call.C, y, x if call.z is None else call.z, skip, call.cb, call.steps[0], call.steps[1], start,
        last, call.cu, call.strides(x), call.strides(call.B), call.strides(call.C), call.strides(call.z), d_strides, call.T,
        call.count, call.size, call.slots,
    )  # fmt: skip
    of_x, of_rows = token_box(call.block, call.columns), token_box(call.block, call.numbers)
    call.start(_start_outputs, (call.slots, call.H, call.parts), arguments, own, of_x, of_rows, of_rows, of_x)
    return y, last
