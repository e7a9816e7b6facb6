"""Functions of a watcher that run inside a compiled program, and that its compiler must not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pass_over(*functions: Callable[..., Any]) -> None:
    """Has Dynamo pass over these functions, as it does over PyTorch's own: it compiles what they call, and not them.

    `torch.compiler.disable` would end a graph where one is called inside of it.
    """
    from torch._dynamo.eval_frame import skip_code

    for function in functions:
        skip_code(function.__code__)
