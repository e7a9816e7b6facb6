"""PyTorch's own fused kernels: the fast path on the CPU, and a comparison on a GPU.

On the CPU it runs FULL and CAUSAL attention with any lengths, also packed ones; on a GPU, FULL only. Where PyTorch's kernels
break Rooftile's contract, it refuses, or corrects their results (`cpu.py`). One limit is left on a GPU: where all scores of a
row lie near a million, dq in bf16 has up to four times the error of the plain definition in bf16, where other backends have
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rooftile.exact.masks import CAUSAL, FULL
from rooftile.exact.spec import DTYPE_NAMES, BackwardInputs, Grads, Options, Spec

NAME = "sdpa"


def refusals(spec: Spec) -> Iterator[str]:
    if spec.layout != "dense" and (spec.layout, spec.device) != ("packed", "cpu"):
        yield f"layout {spec.layout!r}; has 'dense', and on a CPU 'packed'"
    if spec.dim != spec.dim_v:
        yield f"head dims {spec.dim} and {spec.dim_v}; has equal ones"
    if spec.precision is not None:
        yield f"precision {spec.precision}; computes in the dtype of its inputs"
    yield from (f"{name}; has none" for name in spec.options_on)
    if spec.needs_grad and spec.needs_lse:
        yield "gradients through lse; has gradients through the output only"
    if spec.partial:
        yield "an output in fp32 over a part of the keys; has whole outputs in the dtype of the inputs"
    if spec.wide_grads and spec.needs_grad:
        yield "gradients in fp32; has them in the dtype of the inputs"
    if spec.forward_mode:
        yield "forward-mode or second derivatives; has gradients (use backend='eager')"
    yield from _cpu_refusals(spec) if spec.device == "cpu" else _cuda_refusals(spec)


def _cpu_refusals(spec: Spec) -> Iterator[str]:
    if spec.mask not in (FULL, CAUSAL):
        yield f"mask {spec.mask}; has full, causal"
    if spec.scale <= 0:
        # the kernel applies the scale after it sets hidden scores to -inf
        yield f"scale {spec.scale:g}; has positive ones"
    if spec.deterministic:
        # in half precision the batch size decides whether the kernel packs keys, which changes the bits
        yield "deterministic=True; its sums depend on the size of the batch"


def _cuda_refusals(spec: Spec) -> Iterator[str]:
    if not spec.device.startswith("sm") or int(spec.device[2:]) < 80:
        yield f"tensors are on {spec.device}; has cpu, sm80 and newer"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        yield f"{DTYPE_NAMES[spec.dtype]}; has fp16, bf16"
    if spec.dim % 8 or spec.dim > 256:
        yield f"head dim {spec.dim}; has multiples of 8 up to 256"
    if spec.mask != FULL:
        yield f"mask {spec.mask}; has full (what a causal mask hides may leak NaN)"
    if spec.deterministic:
        yield "deterministic=True; its gradients are summed in any order"


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    if spec.device == "cpu":
        from rooftile.exact.backends.sdpa import cpu, cpu_packed

        return cpu.forward(q, k, v, spec) if options.cu_q is None else cpu_packed.forward(q, k, v, options, spec)
    from rooftile.exact.backends.sdpa import cuda

    return cuda.forward(q, k, v, spec)


def backward(inputs: BackwardInputs, spec: Spec, *, far_backward: Callable[..., Grads]) -> Grads:
    """`far_backward` is another backend's, for rows whose lse is far from 0 on a CPU (see `dispatch.LENT`)."""
    do, dlse, q, k, v, o, lse, options = inputs
    assert dlse is None, "a spec with a gradient through lse is refused"
    if do is None:
        return Grads(*(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)))
    if spec.device == "cpu":
        from rooftile.exact.backends.sdpa import cpu, cpu_packed

        if cpu.has_far_rows(lse):
            return far_backward(do, q, k, v, options, spec)
        if options.cu_q is not None:
            return cpu_packed.backward(do, q, k, v, o, lse, options, spec)
        return cpu.backward(do, q, k, v, o, lse, spec)
    from rooftile.exact.backends.sdpa import cuda

    return cuda.backward(do, q, k, v, o, lse, spec)
