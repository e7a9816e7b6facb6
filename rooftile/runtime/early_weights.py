"""Whether a product in a CUDA graph may read its weight before the kernel in front of it has ended.

A graph may change a weight: with `copy_` into its codes, or with an optimiser's step. Then the kernel in front of a product is
perhaps the one that writes what the product would read too soon. So a product waits, unless who captures the graph says that its
weights stay as they are: an engine, which has loaded them before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rooftile.runtime.launch import is_capturing

# captures in one thread say nothing of those in another
_thread = threading.local()


@contextmanager
def weights_stay() -> Iterator[None]:
    """Says that no graph that this thread captures meanwhile writes to a weight.

    Example:
        >>> with weights_stay():
        ...     y = rt.linear(torch.randn(3, 64), rt.quantise_weight(torch.eye(64), "fp8"))
    """
    before = may_read_early_in_graphs()
    _thread.stay = True
    try:
        yield
    finally:
        _thread.stay = before


def may_read_early_in_graphs() -> bool:
    """Whether this thread is inside `weights_stay`."""
    return getattr(_thread, "stay", False)


def may_read_early() -> bool:
    """Whether a product that is launched now may read its weight before the kernel in front of it has ended.

    Outside of graphs it may not: the kernel in front may have made the weight.
    """
    return may_read_early_in_graphs() and bool(is_capturing())
