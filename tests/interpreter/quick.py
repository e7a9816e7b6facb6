"""Reductions by numpy where Triton's interpreter walks the elements in Python: those of `tl.sort` and `tl.topk`.

A choice of blocks sorts a dozen times a program; walked in Python that is nine tenths of its tests' time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def reduce_by_numpy() -> None:
    """Must run before the first kernel does."""
    apply = interpreter.ReduceOps.apply_impl
    ufuncs = {tl.standard._xor_combine: np.bitwise_xor, tl.standard._or_combine: np.bitwise_or}

    def apply_quickly(self: Any, input: Any) -> Any:
        ufunc = ufuncs.get(self.combine_fn)
        if ufunc is None or len(input) != 1 or self.axis is None:
            return apply(self, input)
        (x,) = input
        return self.to_tensor(ufunc.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)

    interpreter.ReduceOps.apply_impl = apply_quickly
