"""Rooftile inside other libraries, without a changed line of model code.

    torch_sdpa      F.scaled_dot_product_attention, and with it nn.MultiheadAttention, timm, diffusers, compiled graphs
    transformers    attn_implementation="rooftile", registered as soon as Rooftile and Transformers are imported
    flash_attn      the functions of the flash-attn package, under their names and in their argument order. flash_attn_3 and
                    flash_attn_4 have the functions of later versions, flash_attn_padding and flash_attn_rotary two of its helpers

The first waits for `enable`. The last ones are imported in place of flash-attn, and by other libraries after
`flash_attn.install()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rooftile.drawing import notebook as shown
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def enable(*, backend: str | None = None) -> None:
    """Let F.scaled_dot_product_attention run on Rooftile, and undo `disable` for Transformers (attn_implementation="rooftile").

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


@answers_foreign_words
def disable() -> None:
    """Undo `enable`; harmless without one. Models with attn_implementation="rooftile" say so when they run, until `enable`."""
    from rooftile.integrations import torch_sdpa, transformers

    transformers.disable()
    torch_sdpa.disable()


@answers_foreign_words
def is_enabled() -> bool:
    """Whether F.scaled_dot_product_attention runs on Rooftile: `enable` was called, and no `disable` after it.

    Example:
        >>> rooftile.is_enabled()
        False
    """
    from rooftile.integrations import torch_sdpa

    return torch_sdpa.is_enabled()


@contextmanager
@answers_foreign_words
def enabled(*, backend: str | None = None) -> Iterator[None]:
    """`enable` inside a `with` block; afterwards all is as before, also if it was enabled with another backend.

    Args and errors are as in `enable`. The whole process sees it, other threads too.

    Example:
        >>> with rooftile.enabled(backend="tiled"):
        ...     o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    from rooftile.integrations import torch_sdpa, transformers

    before = torch_sdpa.state(), transformers._disabled
    enable(backend=backend)
    try:
        yield
    finally:
        was_enabled, earlier = before[0]
        if was_enabled:
            torch_sdpa.enable(earlier)
        else:
            torch_sdpa.disable()
        transformers._disabled = before[1]


class Status(NamedTuple):
    """Counts of what ran since the process began, as `status` returns them; `print` shows a line for each part."""

    enabled: bool  # F.scaled_dot_product_attention runs on Rooftile
    backend: str | None  # the one that `enable` named
    calls: dict[str, int]  # Rooftile's functions, Transformers' models too, by backend
    sdpa: dict[str, int]  # forward calls of F.scaled_dot_product_attention, by backend
    refused: dict[str, int]  # calls that PyTorch's own kernel ran, by reason

    def __repr__(self) -> str:
        on = f"enabled, backend {self.backend or 'the fastest'}" if self.enabled else "not enabled"
        calls, sdpa, refused = (sum(counted.values()) for counted in (self.calls, self.sdpa, self.refused))
        return f"Status({on}; {calls:,} calls, {sdpa:,} of SDPA, {refused:,} refused)"

    def _repr_html_(self) -> str:
        return shown.card(shown.preformatted(str(self)))

    def __str__(self) -> str:
        state = f"yes, backend {self.backend or 'the fastest for each problem'}" if self.enabled else "no"
        lines = [f"enabled   {state}"]
        for title, counted in (("calls", self.calls), ("sdpa", self.sdpa), ("refused", self.refused)):
            shown = [f"{count:,}  {name}" for name, count in counted.items()] or ["none"]
            lines += [f"{'' if n else title:<10}{line}" for n, line in enumerate(shown)]
        return "\n".join(lines)


@answers_foreign_words
def status() -> Status:
    """Says what ran since the process began: calls by backend, and calls of SDPA that stayed with PyTorch's kernel by reason.

    Calls inside compiled graphs and CUDA graphs are not counted when the graphs run.

    Example:
        >>> o = rooftile.attention(q, k, v)
        >>> rooftile.status().calls["sdpa"] > 0
        True
    """
    from rooftile.exact import ops
    from rooftile.integrations import torch_sdpa

    on, backend = torch_sdpa.state()
    counted = (dict(counter.most_common()) for counter in (ops.RAN, torch_sdpa.RAN, torch_sdpa.REFUSED))
    return Status(on, backend, *counted)
