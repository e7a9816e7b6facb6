"""Tile sizes: decisions with their reasons, as pure functions of the problem."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rooftile.exact.masks import CAUSAL, FULL
from rooftile.exact.spec import Spec

# queries of a warpgroup: what one wgmma has
WARPGROUP = 64
# elements of 16 bits in a line of shared memory, which is what a swizzle permutes
SWIZZLE_COLUMNS = 64


# tokens of a page that a box of the copy engine counts together: the rows over which a swizzle repeats
SWIZZLE_ROWS = 8


def padded(dim: int) -> int:
    """A head dim as the kernels hold it."""
    return max(64, 1 << (dim - 1).bit_length())


class Flags(NamedTuple):
    """The part of a kernel's compile-time configuration that every problem has: its argument FLAGS."""

    DIM: int  # columns of queries and keys
    DIM_V: int
    PACKED: bool
    LEFT: bool  # which bounds the mask has
    RIGHT: bool
    PREFIX: bool
    CHUNK: bool
    SOFTCAP: bool


class ForwardTile(NamedTuple):
    """How a program of the forward is staffed and what it holds in shared memory."""

    KEYS: int  # keys per block
    NUM_CONSUMERS: int  # warpgroups, of 64 queries each
    HEADS_PER_TILE: int  # query heads of a group that share a warpgroup's 64
    Q_STAGES: int
    KV_STAGES: int
    PING_PONG: bool  # whether the warpgroups take turns to issue
    Q_IN_REGISTERS: int  # columns of its queries that a warpgroup holds in registers: they need not be read again for every block
    SOFTMAX_FIRST: bool  # whether the product with the values is waited for only after the softmax
    LAZY: bool  # whether outputs are rescaled only when a row's weights have outgrown what they refer to
    COMPUTE_REGISTERS: int
    COPY_REGISTERS: int
    BIAS_STAGES: int = 0  # blocks of a bias; 0: there is none
    BIAS_ROWS: int = 0  # a block's queries for each warpgroup; 1: the bias is the same for all queries
    LIST_T: int = 0  # queries and keys of a listed block; 0: there are no lists
    LIST_S: int = 0
    LIST_BITS: bool = False  # whether some of them are seen in part
    PROGRAMS: int = 1  # per multiprocessor

    @property
    def rows(self) -> int:
        """Rows per query head."""
        return self.NUM_CONSUMERS * WARPGROUP // self.HEADS_PER_TILE


class BackwardTile(NamedTuple):
    """How a program of `flash_bwd` is staffed, for 128 keys, and how far it runs ahead."""

    STAGES: int  # blocks of 64 queries
    DV_AFTER_DS: bool  # whether a block's product with dO is issued after its gradients of the scores are known
    SCORES_AHEAD: bool  # whether the next block's scores are issued before this one is done
    COMPUTE_REGISTERS: int
    DQ_REGISTERS: int  # registers per thread of the warpgroup that multiplies dq, at D = 64
    COPY_REGISTERS: int
    BIAS_STAGES: int = 0  # blocks of a bias; 0: there is none
    BIAS_ROWS: int = 0  # a block's queries for each warpgroup; 1: the bias is the same for all queries
    LIST_T: int = 0  # queries and keys of a listed block; 0: there are no lists
    LIST_S: int = 0
    LIST_BITS: bool = False  # whether some of them are seen in part


class BackwardKeysTile(NamedTuple):
    """`flash_bwd_kv`, for 64 keys."""

    STAGES: int
    COMPUTE_REGISTERS: int
    COPY_REGISTERS: int


class BackwardQueriesTile(NamedTuple):
    """`flash_bwd_q`, for 128 queries."""

    K_STAGES: int  # blocks of 64 keys
    V_STAGES: int
    COMPUTE_REGISTERS: int
    COPY_REGISTERS: int


TWO = ForwardTile(
    KEYS=128, NUM_CONSUMERS=2, HEADS_PER_TILE=1, Q_STAGES=2, KV_STAGES=2, PING_PONG=True, Q_IN_REGISTERS=128,
    SOFTMAX_FIRST=False, LAZY=False,
    COMPUTE_REGISTERS=240, COPY_REGISTERS=24,
)  # fmt: skip
# a branch in the loop pays under a mask. Two of them, which take registers, pay in long sequences that are not packed: there each
# warpgroup overlaps its own products with its own softmax, and turns cost more than they bring
MASKED = TWO._replace(LAZY=True)
LONG = MASKED._replace(SOFTMAX_FIRST=True, PING_PONG=False)
# at D = 64 there is room to run three blocks ahead, and short causal sequences waste less of smaller blocks
NARROW = TWO._replace(KV_STAGES=3, Q_IN_REGISTERS=64)
SHORT = NARROW._replace(KEYS=64, KV_STAGES=4)
# at D = 64 a third warpgroup has room, and shares each block of keys among more queries
THREE = TWO._replace(NUM_CONSUMERS=3, Q_IN_REGISTERS=0, LAZY=True, COMPUTE_REGISTERS=160, COPY_REGISTERS=32)
# at D = 256 the accumulator takes half of the registers, and a tile of queries 64 KiB. The products of a block take four times as
# long as its softmax: nothing is won by turns, and much by leaving out 128 multiplications a thread
WIDE = TWO._replace(KEYS=64, Q_STAGES=1, PING_PONG=False, Q_IN_REGISTERS=0, LAZY=True)

# a block of the bias takes the shared memory of a second tile of queries; one of fp32 takes the memory of half the keys
BIASED = TWO._replace(Q_STAGES=1, Q_IN_REGISTERS=0, LAZY=True, BIAS_STAGES=1, BIAS_ROWS=WARPGROUP)
BIASED_NARROW = NARROW._replace(LAZY=True, BIAS_STAGES=2, BIAS_ROWS=WARPGROUP)


class BiasKind(NamedTuple):
    """A bias as the tiles know it."""

    bytes: int  # per element
    one_row: bool  # all queries have the same

    @property
    def rows(self) -> int:
        return 1 if self.one_row else WARPGROUP


def biased_tile(spec: Spec, bias: BiasKind) -> ForwardTile:
    """Returns the forward's tile with a bias."""
    tile = BIASED if spec.dim > 64 else BIASED_NARROW
    return tile._replace(KEYS=128 if bias.bytes == 2 or bias.one_row else 64, BIAS_ROWS=bias.rows)


def listed_tile(spec: Spec) -> ForwardTile:
    """Returns the forward's tile over lists of blocks: 128 or 64 queries, all of one list."""
    assert spec.block_size is not None
    if spec.block_size[0] % (2 * WARPGROUP):
        return _tile_of_one_warpgroup(spec)
    tile = WIDE if spec.dim > 128 else LONG if spec.dim > 64 else NARROW
    if spec.dim == 96:
        tile = tile._replace(Q_IN_REGISTERS=64)
    LIST_T, LIST_S = spec.block_size
    if LIST_S % tile.KEYS:
        # smaller steps, and as much in flight
        tile = tile._replace(KEYS=64, KV_STAGES=2 * tile.KV_STAGES)
    return tile._replace(LIST_T=LIST_T, LIST_S=LIST_S, LIST_BITS=spec.has_bits)


def _tile_of_one_warpgroup(spec: Spec) -> ForwardTile:
    """64 queries, and what overlaps with their softmax are the products of the other program on their multiprocessor."""
    assert spec.block_size is not None
    LIST_T, LIST_S = spec.block_size
    # at D = 256 one program takes most of the shared memory
    programs = 1 if spec.dim > 128 else 2
    return WIDE._replace(
        NUM_CONSUMERS=1, Q_STAGES=2 if spec.dim == 64 else 1, KV_STAGES=4 if spec.dim == 64 else 2, LIST_T=LIST_T, LIST_S=LIST_S,
        LIST_BITS=spec.has_bits, PROGRAMS=programs, COMPUTE_REGISTERS=224 if programs == 2 else 240,
    )  # fmt: skip


def forward_tile(spec: Spec, T: int) -> ForwardTile:
    """Returns the forward's tile for T queries per sequence, without a bias."""
    if spec.dim > 128:
        return WIDE
    if spec.dim > 64:
        long = spec.layout == "dense" and ((spec.mask == FULL and T >= 2048) or (spec.mask == CAUSAL and T >= 4096))
        tile = LONG if long else TWO if spec.mask == FULL else MASKED
        # 64 of the 96 columns are held in registers
        return tile if spec.dim == 128 else tile._replace(Q_IN_REGISTERS=64)
    # short sequences, and masks that cut both ends, keep smaller tiles busier; 160 registers hold no more than this
    plain = not (spec.softcap or spec.has_sinks)
    if plain and ((spec.mask == FULL and T >= 1024) or (spec.mask == CAUSAL and T >= 8192)):
        return THREE
    return SHORT if spec.mask == CAUSAL and T <= 512 else NARROW


def paged_tile(spec: Spec) -> ForwardTile:
    """The forward's tile for keys and values in pages, or out of them, whatever the lengths: each kind takes seconds to compile.

    The warps that ask for a box a page need more registers. Four heads together are as fast as one in long prompts, and much
    faster in short ones, whose tiles they fill.
    """
    tile = WIDE if spec.dim > 128 else NARROW if spec.dim <= 64 else TWO if spec.mask == FULL else MASKED
    held = 64 if spec.dim == 96 else tile.Q_IN_REGISTERS
    together = next(count for count in (4, 2, 1) if spec.group % count == 0)
    return tile._replace(Q_IN_REGISTERS=held, HEADS_PER_TILE=together, COMPUTE_REGISTERS=232, COPY_REGISTERS=40)


def backward_tile(spec: Spec) -> BackwardTile:
    if spec.block_size is not None:
        LIST_T, LIST_S = spec.block_size
        tile = backward_tile(replace(spec, block_size=None, has_bits=False))
        return tile._replace(LIST_T=LIST_T, LIST_S=LIST_S, LIST_BITS=spec.has_bits)
    # a softcap needs registers
    if spec.dim > 64:
        late = spec.softcap > 0
        # whatever keeps the two warpgroups out of step makes each wait for the other then
        ahead = spec.mask == FULL and spec.layout == "dense" and spec.group == 1
        return BackwardTile(
            STAGES=3, DV_AFTER_DS=late, SCORES_AHEAD=ahead, COMPUTE_REGISTERS=240, DQ_REGISTERS=0, COPY_REGISTERS=24
        )  # fmt: skip
    # without a mask the warpgroups fall into step, and one more product to wait for keeps them out of it
    late = spec.mask == FULL or spec.softcap > 0
    return BackwardTile(STAGES=2, DV_AFTER_DS=late, SCORES_AHEAD=False, COMPUTE_REGISTERS=208, DQ_REGISTERS=72, COPY_REGISTERS=24)


def biased_backward_tile(spec: Spec, bias: BiasKind) -> BackwardTile:
    """Returns the tile of `flash_bwd` with a bias."""
    stages = 1 if spec.dim > 64 and bias.bytes > 2 else 2
    return backward_tile(spec)._replace(SCORES_AHEAD=False, STAGES=2, BIAS_STAGES=stages, BIAS_ROWS=bias.rows)


def backward_kv_tile(spec: Spec) -> BackwardKeysTile:
    return BackwardKeysTile(STAGES=2, COMPUTE_REGISTERS=240, COPY_REGISTERS=24)


def backward_q_tile(spec: Spec) -> BackwardQueriesTile:
    # at D = 256 the queries and the gradients of their outputs take 128 KiB
    slots = 1 if spec.dim > 128 else 2
    return BackwardQueriesTile(K_STAGES=2, V_STAGES=slots, COMPUTE_REGISTERS=240, COPY_REGISTERS=24)
