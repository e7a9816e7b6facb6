"""Matrix products over a head dim that need not be a power of two.

Gluon's tensors are powers of two long, so 96 and 192 lie in shared memory padded with zeros. The products over the head dim leave
the padding out: they are issued for two powers of two that add up to it, 64 + 32 and 128 + 64.
"""

from rooftile.runtime.hopper.gluon import gl, gluon, warpgroup_mma


@gluon.constexpr_function
def num_mmas(DIM):
    """Returns how many wgmma groups `mma_qk` issues."""
    return 1 if DIM & (DIM - 1) == 0 else 2


@gluon.constexpr_function
def _first(DIM):
    return 1 << (DIM.bit_length() - 1)


@gluon.jit
def _first_columns(b, COUNT: gl.constexpr):
    # skip the full slice: the compiler cannot slice some layouts
    if b.shape[1] > COUNT:
        b = b.slice(0, COUNT, 1)
    return b


@gluon.jit
def mma_qk(a, b, DIM: gl.constexpr, layout: gl.constexpr, a_registers=0, IN_REGISTERS: gl.constexpr = 0):
    """Issues a b^T for a (rows, D) and b (columns, D), of which DIM elements are not padding.

    `a_registers` has the first IN_REGISTERS columns of a.
    """
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[0]
    FIRST: gl.constexpr = _first(DIM)
    none = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    if IN_REGISTERS > 0:
        x = warpgroup_mma(a_registers, _first_columns(b, IN_REGISTERS).permute((1, 0)), none, use_acc=False, is_async=True)
        if IN_REGISTERS < DIM:
            LATER: gl.constexpr = DIM - IN_REGISTERS
            x = warpgroup_mma(a.slice(IN_REGISTERS, LATER, 1), b.slice(IN_REGISTERS, LATER, 1).permute((1, 0)), x, is_async=True)
        return x
    if a.shape[1] == FIRST:
        return warpgroup_mma(a, b.permute((1, 0)), none, use_acc=False, is_async=True)
    x = warpgroup_mma(a.slice(0, FIRST, 1), b.slice(0, FIRST, 1).permute((1, 0)), none, use_acc=False, is_async=True)
    if FIRST < DIM:
        REST: gl.constexpr = DIM - FIRST
        x = warpgroup_mma(a.slice(FIRST, REST, 1), b.slice(FIRST, REST, 1).permute((1, 0)), x, is_async=True)
    return x
