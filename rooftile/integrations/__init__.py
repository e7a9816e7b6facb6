"""Rooftile inside other libraries, without a changed line of model code.

    torch_sdpa      F.scaled_dot_product_attention, and with it nn.MultiheadAttention, timm, diffusers, compiled graphs
    transformers    attn_implementation="rooftile"
    flash_attn      the functions of the flash-attn package, under their names and in their argument order. flash_attn_3 and
                    flash_attn_4 have those of later versions, flash_attn_padding and flash_attn_rotary two of its helpers

The first two wait for `enable`. The others are imported in place of flash-attn, and by other libraries after
`flash_attn.install()`.
"""

from __future__ import annotations


def enable(*, backend: str | None = None) -> None:
    """Let F.scaled_dot_product_attention and Transformers (attn_implementation="rooftile") run on Rooftile.

    What Rooftile refuses, or would hand to PyTorch's own kernel anyway, stays with that kernel: see
    `rooftile.integrations.torch_sdpa`. Calling it again changes nothing but the backend.

    Args:
        backend: the backend for F.scaled_dot_product_attention; None takes the fastest for each problem.

    Raises:
        InvalidInput: no backend has that name.
        Unsupported: this PyTorch has no hook for flash-attention implementations.

    Example:
        >>> rooftile.enable()
        >>> o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> rooftile.disable()
    """
    from rooftile.integrations import torch_sdpa, transformers

    torch_sdpa.enable(backend)
    transformers.enable()


def disable() -> None:
    """Undo `enable`; harmless without one."""
    from rooftile.integrations import torch_sdpa, transformers

    transformers.disable()
    torch_sdpa.disable()
