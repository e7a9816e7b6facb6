"""Does once what Triton's interpreter does again and again for the same answer: a kernel's tests take half the time.

    reductions of `tl.sort` and `tl.topk`   it walks the elements in Python, where numpy has an operation
    the language's functions                it looks for them by name whenever a kernel calls a function of its own
    types, and the shapes of tensors        it builds a block's type anew, with names that nobody reads, for every operation

Nothing of the kernels is touched, and no number is computed in another way.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def be_quick() -> None:
    """Must run before the first kernel does."""
    reduce_by_numpy()
    find_functions_once()
    name_tuples_when_asked()
    make_types_once()


def reduce_by_numpy() -> None:
    """A choice of blocks sorts a dozen times a program; walked in Python that is nine tenths of its tests' time."""
    apply = interpreter.ReduceOps.apply_impl
    ufuncs = {tl.standard._xor_combine: np.bitwise_xor, tl.standard._or_combine: np.bitwise_or}

    def apply_quickly(self: Any, input: Any) -> Any:
        ufunc = ufuncs.get(self.combine_fn)
        if ufunc is None or len(input) != 1 or self.axis is None:
            return apply(self, input)
        (x,) = input
        return self.to_tensor(ufunc.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)

    interpreter.ReduceOps.apply_impl = apply_quickly


def find_functions_once() -> None:
    """A scope patches all functions of a module or class, or none of them, so the first one tells whether it must."""
    found: dict[Any, list[tuple[str, Any]]] = {}

    def patch(where: Any, builder: Any, scope: Any) -> None:
        if where not in found:
            found[where] = [pair for pair in inspect.getmembers(where) if core.is_builtin(pair[1])]
        functions = found[where]
        if functions and getattr(where, functions[0][0]) is functions[0][1]:
            for name, function in functions:
                interpreter._patch_attr(where, name, function, builder, scope)

    interpreter._patch_builtin = patch


def name_tuples_when_asked() -> None:
    """The type of a tuple has a name, which is made of all that is in it; almost nobody asks for it."""
    init = core.tuple.__init__

    def keep(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            init(self, args, type)

    def type_of(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.tuple.__init__ = keep
    core.tuple.type = property(type_of, lambda self, type: self.__dict__.update(_type=type))


def make_types_once() -> None:
    """The shape, the size and the name of a block's type; a tensor's shape; numpy's type. So equal shapes are one object."""
    block_init, numpy_of = core.block_type.__init__, interpreter._get_np_dtype
    broadcast_others = TritonSemantic.broadcast_impl_value
    blocks: dict[tuple, tuple] = {}
    shapes: dict[tuple, tuple] = {}
    numpys: dict[str, np.dtype] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *(n.value if isinstance(n, core.constexpr) else n for n in shape))
        if key not in blocks:
            block_init(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            shapes[key] = core.constexpr(math.prod(key)), core.tuple([core.constexpr(n) for n in key])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def numpy_type(type: Any) -> np.dtype:
        name = str(type.scalar)
        if name not in numpys:
            numpys[name] = numpy_of(type.scalar)
        return numpys[name]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast_others(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast
    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = numpy_type
