"""F.scaled_dot_product_attention on Rooftile: its flash and cuDNN operators, forward and backward, on CUDA and on the CPU.

PyTorch decides first: a call reaches these operators if its own rules pick flash attention or, as on Hopper, cuDNN (both fp16 or
bf16 on CUDA). Then Rooftile runs it, unless one of these holds and the kernel that PyTorch picked runs instead:

- dropout, because its mask comes from PyTorch's generator state, which the backward must reproduce;
- attn_mask, ALiBi, paged keys or a debug mask, which this package does not translate;
- is_causal with more queries than keys, which SDPA aligns top-left and Rooftile bottom-right (with fewer queries than
  keys, the last keys are left out on the CPU and for cuDNN; on CUDA PyTorch does not pick flash for either);
- no backend is faster: the choice would be the stock kernel itself ("sdpa") or the definition ("eager"). On the CPU
  PyTorch's kernel is often the fastest, so it always runs unless you call `enable(backend="tiled")`;
- the backend that `enable` named refuses the problem.

So `enable` changes nothing in PyTorch's choice of a kernel, and a call that Rooftile refuses runs what it would run without it.

`dense` and `varlen` have the operators, and `route` decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import dispatch
from rooftile.exact.backends import eager
from rooftile.exact.backends.sdpa import stock
from rooftile.integrations.torch_sdpa import dense, route, varlen
from rooftile.integrations.torch_sdpa.route import RAN, REFUSED

__all__ = ["RAN", "REFUSED", "disable", "enable", "is_enabled", "state"]

NAME = "rooftile"

OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": dense.cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": dense.cpu_backward,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": dense.flash_forward,
        "_scaled_dot_product_flash_attention_backward": dense.flash_backward,
        "_scaled_dot_product_cudnn_attention": dense.cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": dense.cudnn_backward,
        "_flash_attention_forward": varlen.forward,
        "_flash_attention_backward": varlen.backward,
        "_flash_attention_forward_no_dropout_inplace": varlen.forward_inplace,
    },
}

# whether `enable` put Rooftile there, and the implementation that was active before
_before: tuple[str | None] | None = None


def enable(backend: str | None = None) -> None:
    """Put Rooftile behind SDPA's operators. See `rooftile.enable`."""
    global _before
    names = [name for name in dispatch.BACKENDS if name != eager.NAME]
    if backend is not None and backend not in names:
        raise InvalidInput(
            f"backend is {backend!r}; has {', '.join(names)}, or None for the fastest that runs "
            "(for the definition call rooftile.attention(..., backend='eager'))"
        )
    registry = _registry()
    route.named = backend
    if registry.current_flash_attention_impl() == NAME:
        return
    _before = (registry.current_flash_attention_impl(),)
    registry.register_flash_attention_impl(NAME, register_fn=_register)
    registry.activate_flash_attention_impl(NAME)


def disable() -> None:
    """Put back what was there before `enable`."""
    global _before
    if _before is None:
        return
    registry = _registry()
    (previous,) = _before
    route.named = _before = None
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
    return is_enabled(), route.named


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
    for key, operators in OPERATORS.items():
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
