"""The names of Gluon that differ between Triton releases, in one place.

Gluon is Triton's lower dialect: the program says which threads hold what, and issues the chip's asynchronous copies and
matrix products itself. Triton 3.6 is the oldest that this backend compiles with; 3.9 renamed some functions.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

try:
    from triton.experimental.gluon import aggregate as _aggregate
except ImportError:  # before 3.7
    from triton.language.core import _aggregate

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "barrier",
    "copy_arrived",
    "copy_words",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpreted",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

# 3.9 keeps the old names only to say that they are gone
tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
tma_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
tma_store_wait = tma.store_wait


def aggregate(cls):
    """Gluon's aggregate: a class without an `__init__` takes its fields in their order, which Gluon itself has from 3.9 on."""
    if "__init__" not in vars(cls):
        cls.__init__ = _init_of(cls.__annotations__)
    return _aggregate(cls)


def _init_of(kinds):
    # constexprs are in the key under which a kernel is kept, so that other fields compile it anew
    NAMES = gl.constexpr(tuple(kinds))
    CONSTANTS = gl.constexpr(tuple(name for name, kind in kinds.items() if kind is gl.constexpr))

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, value in zip(NAMES.value, values, strict=True):
            setattr(self, name, gl.constexpr(value) if name in CONSTANTS.value else value)

    return __init__


@builtin
def _tma_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpreted(buffer, dtype, shape, layout, _semantic=None):
    """Shared memory as if it were of another shape and layout; the method is public from 3.9 on."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


# adds shared memory to memory; in 3.6 the compiler has it, and the language no name for it
tma_add = getattr(tma, "async_atomic_add", _tma_add)
# copies of words by threads, and their arrival
copy_arrived = async_copy.mbarrier_arrive
copy_words = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
