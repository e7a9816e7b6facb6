"""Compiles the configurations of other libraries' autotuned Triton kernels side by side, before their autotuners time them.

An autotuner compiles and times one configuration after the other, on one core: mamba-ssm and fla take minutes so. What is timed,
and what is chosen, stays theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """Compiles in as many threads as there are cores, for autotuners that run inside the block."""
    import triton
    from triton.runtime.autotuner import Autotuner

    plain = Autotuner._bench
    # by the autotuner and all that its kernel is compiled for
    seen: set[tuple[int, str]] = set()

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        kind = id(self), repr([(x.shape, x.dtype) if hasattr(x, "shape") else x for x in (*args, *meta.values())])
        if kind not in seen:
            seen.add(kind)
            with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for one in self.configs:
                    self.fn.run(*args, **(meta | {"warmup": True} | one.all_kwargs()))
        return plain(self, *args, config=config, **meta)

    Autotuner._bench = bench
    try:
        yield
    finally:
        Autotuner._bench = plain
