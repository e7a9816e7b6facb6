"""The gradient of the gate: y silu(z) needs y itself again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel

_BLOCK = 1024
_CONSTANTS = {"BLOCK": _BLOCK, "num_warps": 4}


# fmt: off
@triton.jit(do_not_specialize=["size"])
def _gate_gradients(dy_ptr, y_ptr, z_ptr, g_ptr, dz_ptr, size, BLOCK: tl.constexpr):
    # fmt: on
    """Writes the gradients of y, before the gate, and of z."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = n < size
    dy, y = tl.load(dy_ptr + n, mask=here, other=0.0).to(tl.float32), tl.load(y_ptr + n, mask=here, other=0.0)
    z = tl.load(z_ptr + n, mask=here, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-z))
    tl.store(g_ptr + n, (dy * z * sigmoid).to(g_ptr.dtype.element_ty), mask=here)
    tl.store(dz_ptr + n, (dy * y * sigmoid * (1 + z * (1 - sigmoid))).to(dz_ptr.dtype.element_ty), mask=here)


_start = Kernel(_gate_gradients)


def through_gate(dy: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of y (in fp32, contiguous) and of z, of y silu(z)."""
    dy, z = dy.contiguous(), z.contiguous()
    g, dz = torch.empty_like(z), torch.empty_like(z)
    _start((triton.cdiv(y.numel(), _BLOCK), 1, 1), (dy, y, z, g, dz, y.numel()), _CONSTANTS)
    return g, dz
