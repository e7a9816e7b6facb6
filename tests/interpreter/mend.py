"""Two faults of Triton's interpreter before 3.7, mended for the tests: nothing of the kernels is touched.

    range(0, n) of a tensor n     numpy 2.4 and newer no longer turn an array of one element into an int
    tl.dot of bf16                the interpreter keeps bf16 as its 16 bits, and multiplies those as integers
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Must run before the first kernel does."""
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_with_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot_of_numbers(self, a, b, *others):
        return dot(self, _numbers(a), _numbers(b), *others)

    interpreter._patch_lang_tensor = patch_with_index
    interpreter.InterpreterBuilder.create_dot = dot_of_numbers


def _numbers(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """bf16 as the fp32 numbers that its bits begin; any other operand as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = np.asarray(handle.data, dtype=np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
