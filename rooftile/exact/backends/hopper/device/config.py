"""The compile-time configuration that the parts of the forward and of decoding share."""

from rooftile.exact.backends.hopper.tiles import SWIZZLE_COLUMNS, SWIZZLE_ROWS, WARPGROUP
from rooftile.numerics import softmax
from rooftile.runtime.hopper.gluon import aggregate, gl, gluon, reinterpreted
from rooftile.runtime.hopper.pipeline import Ring

LOG2E, LN2 = gl.constexpr(softmax.LOG2E), gl.constexpr(softmax.LN2)
# queries of a warpgroup: what one wgmma has
WG_ROWS = gl.constexpr(WARPGROUP)


@gluon.jit
def query_offset(row, ROWS: gl.constexpr):
    """How far a warpgroup's row is from its first position, if there are ROWS of them."""
    if ROWS < WG_ROWS:
        row = row % ROWS
    return row


@gluon.constexpr_function
def swizzled_layout(rows, columns):
    """The layout of rows that lie by eights, and of each eight line by line of columns: where each bit of an address leads."""
    within = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    lines = [[0, SWIZZLE_COLUMNS << i] for i in range((columns // SWIZZLE_COLUMNS).bit_length() - 1)]
    eights = [[SWIZZLE_ROWS << i, 0] for i in range((rows // SWIZZLE_ROWS).bit_length() - 1)]
    return gl.SharedLinearLayout(within + lines + eights, [], 1024)


@gluon.jit
def _as_matrix(buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LINES: gl.constexpr):
    if LINES > 1:
        block = reinterpreted(buffer, buffer.dtype, [ROWS, COLUMNS], swizzled_layout(ROWS, COLUMNS))
    else:
        block = buffer.reshape([ROWS, COLUMNS])
    return block


@aggregate
class KernelConfig:
    """The compile-time configuration of a forward or decoding kernel."""

    GROUP: gl.constexpr
    D: gl.constexpr  # columns of a query and a key in shared memory, padded with zeros to a power of two
    DV: gl.constexpr  # columns of a value and an output
    DIM: gl.constexpr  # the same two in memory
    DIM_V: gl.constexpr
    KEYS: gl.constexpr  # keys per block
    NUM_CONSUMERS: gl.constexpr  # warpgroups that compute
    HEADS_PER_TILE: gl.constexpr  # query heads of a group that share each one's rows
    ROWS: gl.constexpr  # rows per warpgroup and head
    PING_PONG: gl.constexpr  # whether they take turns to issue
    Q_IN_REGISTERS: gl.constexpr  # columns of its queries that each holds in registers
    LAZY: gl.constexpr  # whether outputs are rescaled only when they must be
    SOFTMAX_FIRST: gl.constexpr  # whether they wait for the product with the values only after the softmax
    PACKED: gl.constexpr
    PAGE_SIZE: gl.constexpr  # tokens of a page in which keys and values lie; 0: they lie in a row
    TMA_TOKENS: gl.constexpr  # tokens of a page that one copy takes
    K_TMA_LINES: gl.constexpr  # swizzled lines of a key that one copy of a page takes (`tma.box_of_pages`), or 1
    V_TMA_LINES: gl.constexpr
    MASKED: gl.constexpr  # anything but a full mask
    SOFTCAP: gl.constexpr
    SINKS: gl.constexpr
    BIAS: gl.constexpr  # the dtype of the bias, or None
    LIST_S: gl.constexpr  # keys of a listed block; 0: there are no lists
    LIST_BITS: gl.constexpr  # whether some of them are seen in part
    s_layout: gl.constexpr
    o_layout: gl.constexpr
    p_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **fields):
        """Takes the fields by name; the defaults fit a kernel with one warpgroup and rows of keys."""
        plain = {"PING_PONG": False, "LAZY": False, "SOFTMAX_FIRST": False, "PACKED": False, "LIST_BITS": False}
        plain |= {"NUM_CONSUMERS": 1, "HEADS_PER_TILE": 1, "Q_IN_REGISTERS": 0, "BIAS": None, "LIST_S": 0}
        for name, value in {**plain, **fields}.items():
            setattr(self, name, gl.constexpr(value))
        KEYS, DV = fields["KEYS"], fields["DV"]
        self.ROWS = gl.constexpr(WARPGROUP // self.HEADS_PER_TILE.value)
        self.TMA_TOKENS = gl.constexpr(min(fields["PAGE_SIZE"], KEYS))
        o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
        self.s_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
        self.o_layout = gl.constexpr(o_layout)
        self.p_layout = gl.constexpr(gl.DotOperandLayout(0, o_layout, 2))

    @gluon.jit
    def key_block(self, keys: Ring, fill):
        """A block (KEYS, D) in shared memory."""
        return _as_matrix(keys.buffer(fill), self.KEYS, self.D, self.K_TMA_LINES)

    @gluon.jit
    def value_block(self, values: Ring, fill):
        """A block (KEYS, DV) in shared memory."""
        return _as_matrix(values.buffer(fill), self.KEYS, self.DV, self.V_TMA_LINES)

    @gluon.jit
    def query_head(self, row, work):
        """The query head of a warpgroup's row; a work tile counts heads in groups of HEADS_PER_TILE."""
        h = work.h
        if self.HEADS_PER_TILE > 1:
            h = work.h * self.HEADS_PER_TILE + row // self.ROWS
        return h
