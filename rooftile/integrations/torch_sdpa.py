"""F.scaled_dot_product_attention on Rooftile: its flash operators, forward and backward, on CUDA and on the CPU.

PyTorch decides first: a call reaches these operators if its own rules pick flash attention (on CUDA: fp16 or bf16, no
attn_mask). Then Rooftile runs it, unless one of these holds and the stock kernel runs instead:

- dropout, because its mask comes from PyTorch's generator state, which the backward must reproduce;
- attn_mask, ALiBi, paged keys or a debug mask, which this module does not translate;
- is_causal with more queries than keys, which SDPA aligns top-left and Rooftile bottom-right (with fewer queries than
  keys, the last keys are left out on the CPU; on CUDA PyTorch does not pick flash for either);
- no backend is faster: the choice would be the stock kernel itself ("sdpa") or the definition ("eager"). On the CPU
  PyTorch's kernel is often the fastest, so it always runs unless you call `enable(backend="tiled")`;
- the backend that `enable` named refuses the problem.

On Hopper PyTorch prefers cuDNN to flash, so `enable` switches cuDNN attention off and `disable` restores it.

Strides and the unused outputs are part of each operator's contract: Inductor asserts the strides of the stock kernel's
fake. CUDA: out and gradients are laid out like their inputs and lse is contiguous. CPU: lse is a view of (B, T, H), the
gradients are views of (B, T, H, D).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rooftile import dispatch
from rooftile.backends import eager, sdpa
from rooftile.backends.sdpa import stock
from rooftile.errors import InvalidInput, Unsupported
from rooftile.hardware.arch import arch
from rooftile.masks import CAUSAL, FULL, Mask, Window
from rooftile.spec import DTYPE_NAMES, Options, Spec

NAME = "rooftile"

# these would run the stock kernel itself, or the O(T S) definition
_NO_GAIN = (sdpa.NAME, eager.NAME)

_backend: str | None = None
# forward calls by the backend that ran them, and by why PyTorch's own kernel did, since the process began
RAN: Counter[str] = Counter()
REFUSED: Counter[str] = Counter()
_before: tuple[str | None, bool] | None = None


def enable(backend: str | None = None) -> None:
    """Put Rooftile behind SDPA's flash operators. See `rooftile.enable`."""
    global _backend, _before
    names = [name for name in dispatch.BACKENDS if name != eager.NAME]
    if backend is not None and backend not in names:
        raise InvalidInput(
            f"backend is {backend!r}; has {', '.join(names)}, or None for the fastest that runs "
            "(for the definition call rooftile.attention(..., backend='eager'))"
        )
    registry = _registry()
    _backend = backend
    if registry.current_flash_attention_impl() == NAME:
        return
    _before = (registry.current_flash_attention_impl(), torch.backends.cuda.cudnn_sdp_enabled())
    registry.register_flash_attention_impl(NAME, register_fn=_register)
    registry.activate_flash_attention_impl(NAME)
    torch.backends.cuda.enable_cudnn_sdp(False)


def disable() -> None:
    """Put back what was there before `enable`."""
    global _backend, _before
    if _before is None:
        return
    registry = _registry()
    previous, cudnn = _before
    _backend = _before = None
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    # another implementation may be active by now: leave it
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()
        if previous is not None:
            registry.activate_flash_attention_impl(previous)


def is_enabled() -> bool:
    """Whether Rooftile is the active implementation behind SDPA."""
    import torch.nn.attention as registry

    current = getattr(registry, "current_flash_attention_impl", None)
    return current is not None and current() == NAME


def state() -> tuple[bool, str | None]:
    """Whether Rooftile is active, and the backend that `enable` named."""
    return is_enabled(), _backend


def _registry() -> ModuleType:
    import torch.nn.attention as registry

    if not hasattr(registry, "register_flash_attention_impl") or not hasattr(torch.library, "get_kernel"):
        raise Unsupported(
            f"torch {torch.__version__} lacks register_flash_attention_impl or library.get_kernel, which "
            "rooftile.enable() needs; use torch >= 2.11, or call rooftile.attention"
        )
    return registry


class _Handle:
    """Keeps the overrides in place until PyTorch's registry removes them."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        self.library = None


def _register() -> _Handle:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns that a kernel is overridden, but the caller asked for that
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        _override(library)
    return _Handle(library)


def _override(library: torch.library.Library) -> None:
    for key, operators in (("CPU", _CPU), ("CUDA", _CUDA)):
        if key == "CUDA" and not torch.backends.cuda.is_built():
            continue
        for name, override in operators.items():
            if hasattr(torch.ops.aten, name):
                library.impl(name, _or_stock(f"aten::{name}", key, override), key)


def _or_stock(name: str, key: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel that calls the override, and the stock kernel if the override returns None."""
    # look it up before the override is registered
    kernel_of_torch = stock.kernel(name, key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = override(*args, **kwargs)
        return kernel_of_torch(*args, **kwargs) if found is None else found

    return kernel


@cache
def _route(backend: str | None, **problem: Any) -> tuple[ModuleType, Spec] | str:
    """Chooses the backend for a problem, given as Spec fields. Returns it and the Spec, or why the stock kernel runs."""
    spec = Spec(**problem)
    chosen = dispatch.select(spec) if backend is None else dispatch.BACKENDS[backend]
    refusal = next(chosen.refusals(spec), None)
    if refusal is not None:
        return f"{chosen.NAME}: {refusal}"
    if chosen.NAME in _NO_GAIN:
        return f"PyTorch's kernel is the fastest on {spec.device}"
    return chosen, spec


def _refuse(reason: str) -> None:
    """Counts a forward call that PyTorch's own kernel runs."""
    REFUSED[reason] += 1


def _plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, needs_grad: bool, options: Options
) -> tuple[ModuleType, Spec] | str:
    """Chooses the backend for these (B, T, H, D) or (total, H, D) tensors, or says why the stock kernel runs."""
    if q.dtype not in DTYPE_NAMES or not q.numel() or not k.numel() or q.shape[-2] % k.shape[-2]:
        return "an unusual dtype, no elements, or heads that do not divide"
    # the operators have checked the shapes
    return _route(
        _backend,
        dtype=q.dtype,
        dim=q.shape[-1],
        dim_v=v.shape[-1],
        group=q.shape[-2] // k.shape[-2],
        mask=mask,
        layout="dense" if options.cu_q is None else "packed",
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        needs_grad=needs_grad,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        device=arch(q.device),
    )


def _forward(q, k, v, mask, scale, options: Options) -> tuple[Tensor, Tensor] | None:
    plan = _plan(q, k, v, mask, scale, False, options)
    if isinstance(plan, str):
        _refuse(plan)
        return None
    RAN[plan[0].NAME] += 1
    o, lse = plan[0].forward(q, k, v, options, plan[1])
    return o, lse


def _backward(do, q, k, v, o, lse, mask, scale, options: Options):
    plan = _plan(q, k, v, mask, scale, True, options)
    if isinstance(plan, str):
        return None
    return dispatch.backward_of(plan[0].NAME)(do, None, q, k, v, o, lse.contiguous(), options, plan[1])[:3]


# dense: (B, H, T, D) in and out


def _is_ours(query: Tensor, key: Tensor, dropout_p: float, is_causal: bool) -> bool:
    return dropout_p == 0.0 and not (is_causal and query.shape[2] > key.shape[2])


def _visible(query: Tensor, is_causal: bool, *pair: Tensor) -> tuple[Tensor, ...]:
    """Returns keys and values as (B, S, Hk, D), without those that no query sees under a top-left causal mask."""
    pair = tuple(x.transpose(1, 2) for x in pair)
    return tuple(x[:, : query.shape[2]] for x in pair) if is_causal else pair


def _dense_forward(query, key, value, dropout_p, is_causal, scale) -> tuple[Tensor, Tensor] | None:
    """Returns o (B, T, H, D) and lse (B, H, T)."""
    if not _is_ours(query, key, dropout_p, is_causal):
        _refuse("dropout" if dropout_p else "is_causal with more queries than keys")
        return None
    k, v = _visible(query, is_causal, key, value)
    return _forward(query.transpose(1, 2), k, v, CAUSAL if is_causal else FULL, scale, Options())


def _dense_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale):
    """Returns dq, dk, dv as (B, T, H, D)."""
    if not _is_ours(query, key, dropout_p, is_causal):
        return None
    k, v = _visible(query, is_causal, key, value)
    do, q, o = (x.transpose(1, 2) for x in (grad_out, query, out))
    grads = _backward(do, q, k, v, o, logsumexp, CAUSAL if is_causal else FULL, scale, Options())
    if grads is None:
        return None
    hidden = key.shape[2] - k.shape[1]
    dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, hidden)) if hidden else x for x in grads[1:])
    return grads[0], dk, dv


def _laid_out_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns x with the strides of empty_like(like), as the operator's fake has them."""
    due = torch.empty_like(like)
    return x if x.stride() == due.stride() else due.copy_(x)


def _cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if attn_mask is not None:
        return _refuse("attn_mask")
    found = _dense_forward(query, key, value, dropout_p, is_causal, scale)
    if found is None:
        return None
    o, lse = found
    return _laid_out_like(o.transpose(1, 2), query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):  # fmt: skip
    if attn_mask is not None:
        return None
    grads = _dense_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale)
    return grads and tuple(x.transpose(1, 2) for x in grads)


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns placeholders for the generator's state, its offset and the debug mask of a call without dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _cuda_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if return_debug_mask or (is_causal and query.shape[2] != key.shape[2]):
        return _refuse("a debug mask" if return_debug_mask else "is_causal with other numbers of queries and keys")
    found = _dense_forward(query, key, value, dropout_p, is_causal, scale)
    if found is None:
        return None
    o, lse = found
    o = _laid_out_like(o.transpose(1, 2), query)
    return o, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _cuda_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    if is_causal and query.shape[2] != key.shape[2]:
        return None
    grads = _dense_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale)
    if grads is None:
        return None
    return tuple(_laid_out_like(x.transpose(1, 2), like) for x, like in zip(grads, (query, key, value), strict=True))


# the operators under SDPA's, which torch.nn.attention.varlen calls: (B, T, H, D), or (total, H, D) with offsets.
# Causal and windows are aligned bottom-right here


def _window(is_causal: bool, left: int | None, right: int | None) -> Mask:
    """-1 and None leave a side open."""
    left, right = (None if side is None or side < 0 else int(side) for side in (left, right))
    return Window(left, right) & (CAUSAL if is_causal else FULL)


def _varlen_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    **newer,
):  # fmt: skip
    untranslated = (seqused_k, alibi_slopes, block_table, *newer.values())
    if dropout_p or return_debug_mask or any(x is not None for x in untranslated):
        return _refuse("varlen attention with dropout, a debug mask, ALiBi, paged keys or an argument of a newer PyTorch")
    if (cum_seq_q is None) != (cum_seq_k is None):
        return _refuse("varlen attention with offsets of queries or of keys alone")
    mask = _window(is_causal, window_size_left, window_size_right)
    found = _forward(query, key, value, mask, scale, Options(cu_q=cum_seq_q, cu_k=cum_seq_k))
    if found is None:
        return None
    return _laid_out_like(found[0], query), found[1], *_unused(query)


def _varlen_forward_inplace(out, *args, **kwargs):
    found = _varlen_forward(*args, **kwargs)
    if found is None:
        return None
    out.copy_(found[0])
    return found[1]


def _varlen_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None, **newer,
):  # fmt: skip
    if dropout_p or any(x is not None for x in newer.values()) or (cum_seq_q is None) != (cum_seq_k is None):
        return None
    mask = _window(is_causal, window_size_left, window_size_right)
    options = Options(cu_q=cum_seq_q, cu_k=cum_seq_k)
    grads = _backward(grad_out, query, key, value, out, logsumexp, mask, scale, options)
    if grads is None:
        return None
    return tuple(_laid_out_like(x, like) for x, like in zip(grads, (query, key, value), strict=True))


_CPU: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
_CUDA: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _cuda_forward,
    "_scaled_dot_product_flash_attention_backward": _cuda_backward,
    "_flash_attention_forward": _varlen_forward,
    "_flash_attention_backward": _varlen_backward,
    "_flash_attention_forward_no_dropout_inplace": _varlen_forward_inplace,
}
