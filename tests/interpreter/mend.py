"""Five faults of Triton's interpreter, mended for the tests: nothing of the kernels is touched.

Before 3.7:

    range(0, n) of a tensor n     numpy 2.4 and newer no longer turn an array of one element into an int

In 3.6 and in 3.9:

    tl.dot of bf16                the interpreter keeps bf16 as its 16 bits, and multiplies those as integers
    fp32 to bf16                  cut off, where a GPU rounds to nearest
    fp32 to fp8e4nv and back      a mantissa that is rounded up past its last bit loses its carry, ties are rounded up, and NaN
                                  comes back as 480

In 3.9:

    loads and stores              a mask whose bits numpy keeps as integers is refused
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Mends what this version has; must run before the first kernel does."""
    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7):
        take_tensors_as_indices()
    multiply_numbers()
    round_to_nearest()
    take_integers_as_masks()


def take_tensors_as_indices() -> None:
    """Mends ranges."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def multiply_numbers() -> None:
    """Mends products."""
    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_numbers(self, a, b, *others):
        return dot(self, _numbers(a), _numbers(b), *others)

    interpreter.InterpreterBuilder.create_dot = dot_of_numbers


def take_integers_as_masks() -> None:
    """Mends masks."""
    load, store = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store

    def load_by_bits(self, ptrs, mask, *others, **words):
        return load(self, ptrs, _bits(mask), *others, **words)

    def store_by_bits(self, ptrs, value, mask, *others):
        return store(self, ptrs, value, _bits(mask), *others)

    interpreter.InterpreterBuilder.create_masked_load = load_by_bits
    interpreter.InterpreterBuilder.create_masked_store = store_by_bits


def round_to_nearest() -> None:
    """Mends conversions."""
    convert = interpreter._convert_float

    def convert_to_nearest(x, input_dtype, output_dtype, rounding_mode):
        wider = {tl.float32: (torch.float32, np.uint32), tl.float16: (torch.float16, np.uint16)}
        if input_dtype == tl.float8e4nv and output_dtype in wider:
            dtype, bits = wider[output_dtype]
            return torch.from_numpy(np.array(x)).view(torch.float8_e4m3fn).to(dtype).numpy().view(bits)
        if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(np.array(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (input_dtype, output_dtype) != (tl.float32, tl.float8e4nv):
            return convert(x, input_dtype, output_dtype, rounding_mode)
        nearest = torch.from_numpy(np.array(x)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return nearest.view(torch.uint8).numpy()

    interpreter._convert_float = convert_to_nearest


def _bits(mask: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """A mask as numpy's booleans."""
    return interpreter.TensorHandle(np.asarray(mask.data, dtype=bool), tl.int1)


def _numbers(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """bf16 as the fp32 numbers that its bits begin; any other operand as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = np.asarray(handle.data, dtype=np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
