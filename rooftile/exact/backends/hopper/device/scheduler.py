"""Work tiles: a program draws the next tile of a head, and publishes what its warp roles need to know of it.

A program stays on its multiprocessor and takes one tile after another. Numbers are drawn from a counter in memory: who
finishes early draws again. The tiles are numbered head by head, so that the programs at work share few heads, whose keys and
values are read from memory once and then found in the L2 cache. The last heads are taken together, the tiles with the most
work first, so that at the end no program is left with a long one.

Packed sequences: sequence b owns the slots from cu[b] // ROWS + b on. That is never fewer than its tiles, and needs no prefix
sum and no word from the host; a slot past a sequence's end is skipped. Which of the last tiles has how much work is found by
the warp that draws it, from the lengths of all sequences, a lane each.
"""

from rooftile.exact.backends.device.row_stats import ROWS_PADDED
from rooftile.exact.backends.hopper.device.mask import first_key, first_position, last_key, last_position
from rooftile.runtime.hopper.gluon import aggregate, gl, gluon, mbarrier
from rooftile.runtime.hopper.pipeline import Ring

# int32 words per work tile in shared memory: a power of two, as every shape here
WORK_TILE_WORDS = gl.constexpr(16)
# the most packed sequences whose tiles are put in the order of their work: a lane each
MOST_SORTED = gl.constexpr(32)
# the backward pads sequences of queries to a multiple of this: the largest of its blocks
PADDED = gl.constexpr(ROWS_PADDED)


@aggregate
class WorkTile:
    """One tile of queries and the keys that it walks."""

    is_valid: gl.tensor  # 0: this tile is past its sequence's end, or no tile is left
    b: gl.tensor  # packed: 0
    h: gl.tensor
    t: gl.tensor  # the tile's first query, within its sequence
    T: gl.tensor  # the lengths of its sequence
    S: gl.tensor
    q_start: gl.tensor  # packed: where the sequence begins among the queries and the keys; of keys in pages the sequence's number
    k_start: gl.tensor
    padded_start: gl.tensor  # packed: where it begins when each sequence's queries are padded to a multiple of 128
    first_block: gl.tensor  # the blocks it walks: for queries blocks of keys, from last down to first, both included
    last_block: gl.tensor

    @gluon.jit
    def with_steps(self, steps):
        """The tile of a list of blocks, with the number of its steps as the blocks that it walks; there is at least one."""
        last = gl.maximum(steps - 1, 0)
        return WorkTile(
            self.is_valid, self.b, self.h, self.t, self.T, self.S, self.q_start, self.k_start, self.padded_start, last * 0, last
        )


@aggregate
class MaskBounds:
    """A mask's numbers, and which of them it has."""

    left: gl.tensor
    right: gl.tensor
    prefix: gl.tensor
    chunk: gl.tensor
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    PREFIX: gl.constexpr
    CHUNK: gl.constexpr
    SLOPED: gl.constexpr  # whether queries see more the later they come

    @gluon.constexpr_function
    def __init__(self, left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK):
        self.left = left
        self.right = right
        self.prefix = prefix
        self.chunk = chunk
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.PREFIX = gl.constexpr(PREFIX)
        self.CHUNK = gl.constexpr(CHUNK)
        self.SLOPED = gl.constexpr(RIGHT and not (LEFT or CHUNK))

    @gluon.jit
    def first_key(self, i):
        return first_key(i, self.left, self.chunk, self.LEFT, self.CHUNK)

    @gluon.jit
    def last_key(self, i, S):
        return last_key(i, S, self.right, self.prefix, self.chunk, self.RIGHT, self.PREFIX, self.CHUNK)

    @gluon.jit
    def first_position(self, j):
        return first_position(j, self.right, self.prefix, self.chunk, self.RIGHT, self.PREFIX, self.CHUNK)

    @gluon.jit
    def last_position(self, j):
        return last_position(j, self.left, self.chunk, self.LEFT, self.CHUNK)


@gluon.jit
def dense_tile(n, tiles, heads, balanced_heads):
    """The (head of the batch, tile) of number n: head by head, but the last `tail` heads together, longest tiles first."""
    alone = (heads - balanced_heads) * tiles
    rank = n - alone
    i_head = gl.where(rank < 0, n // tiles, heads - balanced_heads + rank % gl.maximum(balanced_heads, 1))
    i_tile = gl.where(rank < 0, n % tiles, rank // gl.maximum(balanced_heads, 1))
    return i_head, tiles - 1 - i_tile


@gluon.jit
def packed_tile(slot, cu_ptr, B, ROWS: gl.constexpr):
    """The (sequence, tile) of a slot; within a sequence the last tiles first. The tile may lie past the sequence's end."""
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(cu_ptr + middle).to(gl.int32) // ROWS + middle <= slot:
            low = middle
        else:
            high = middle
    end = gl.load(cu_ptr + low + 1).to(gl.int32) // ROWS + low + 1
    return low, end - 1 - slot


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _at_least(size, tiles, top, SLOPED: gl.constexpr):
    """How many tiles of each sequence have at least so much work."""
    if SLOPED:
        found = gl.minimum(gl.maximum(top - size + 1, 0), tiles)
    else:
        found = gl.where(top >= size, tiles, 0)
    return gl.where(size <= 0, tiles, found)


@gluon.jit
def tile_by_work(rank, cu_own_ptr, cu_walked_ptr, B, ROWS: gl.constexpr, SLOPED: gl.constexpr, LENGTHS: gl.constexpr = False):
    """The (sequence, rank within it) of the tile with that rank by work, the most first; a rank of -1 past the last.

    `cu_own`: offsets of the axis cut into tiles of ROWS. `cu_walked`: offsets of the axis that each tile loops over (LENGTHS: its
    lengths instead). SLOPED (causal): each tile loops over ROWS fewer elements than the one before; otherwise all tiles of a
    sequence cost the same. For at most MOST_SORTED sequences; called by one warp.
    """
    lane = gl.arange(0, MOST_SORTED, gl.BlockedLayout([1], [32], [1], [0]))
    in_bounds = lane < B
    own = gl.load(cu_own_ptr + lane + 1, mask=in_bounds, other=0) - gl.load(cu_own_ptr + lane, mask=in_bounds, other=0)
    if LENGTHS:
        walked = gl.load(cu_walked_ptr + lane, mask=in_bounds, other=0)
    else:
        walked = gl.load(
            cu_walked_ptr + lane + 1, mask=in_bounds, other=0
        ) - gl.load(cu_walked_ptr + lane, mask=in_bounds, other=0)  # fmt: skip
    tiles = (own.to(gl.int32) + (ROWS - 1)) // ROWS
    top = (walked.to(gl.int32) + (ROWS - 1)) // ROWS
    # the most work that more than `rank` tiles have
    size = 0
    high = gl.max(top, 0) + 1
    while high - size > 1:
        middle = (size + high) // 2
        if gl.sum(_at_least(middle, tiles, top, SLOPED), 0) > rank:
            size = middle
        else:
            high = middle
    before = _at_least(size + 1, tiles, top, SLOPED)
    equal = _at_least(size, tiles, top, SLOPED) - before
    rest = rank - gl.sum(before, 0)
    skipped = gl.associative_scan(equal, 0, _add) - equal
    mine = (rest >= skipped) & (rest < skipped + equal)
    return gl.sum(gl.where(mine, lane, 0), 0), gl.sum(gl.where(mine, before + rest - skipped + 1, 0), 0) - 1


@gluon.jit
def padded_row(i_b, q_start):
    """Returns the first row of sequence i_b if the queries of each sequence are padded; sequences do not overlap."""
    return (q_start // PADDED + i_b) * PADDED


@gluon.jit
def make_work_tile(
    n, B, H, T, S, tiles, balanced_heads, cu_q_ptr, cu_k_ptr, mask, ROWS: gl.constexpr, KEYS: gl.constexpr, PACKED: gl.constexpr,
    PAGED: gl.constexpr = False,
):  # fmt: skip
    """Makes the work tile of number n, below the number of tiles; it is not valid if its slot is past its sequence's end.

    PAGED: packed queries, and keys in pages: cu_k_ptr has lengths, and `k_start` is the sequence's number.
    """
    zero = n * 0
    if PACKED:
        h, slot = dense_tile(n, tiles, H, balanced_heads)
        if (n >= (H - balanced_heads) * tiles) & (B <= MOST_SORTED):
            i_b, rank = tile_by_work(tiles - 1 - slot, cu_q_ptr, cu_k_ptr, B, ROWS, mask.SLOPED, PAGED)
            last_tile = (gl.load(cu_q_ptr + i_b + 1).to(gl.int32) - gl.load(cu_q_ptr + i_b).to(gl.int32) - 1) // ROWS
            i_tile = gl.where(rank < 0, last_tile + 1, last_tile - rank)
        else:
            i_b, i_tile = packed_tile(tiles - 1 - slot, cu_q_ptr, B, ROWS)
        q_start = gl.load(cu_q_ptr + i_b).to(gl.int32)
        T = gl.load(cu_q_ptr + i_b + 1).to(gl.int32) - q_start
        if PAGED:
            k_start = i_b
            S = gl.load(cu_k_ptr + i_b)
        else:
            k_start = gl.load(cu_k_ptr + i_b).to(gl.int32)
            S = gl.load(cu_k_ptr + i_b + 1).to(gl.int32) - k_start
        b = zero
        padded_start = padded_row(i_b, q_start)
    else:
        i_bh, i_tile = dense_tile(n, tiles, B * H, balanced_heads)
        b = i_bh // H
        h = i_bh % H
        q_start = zero
        k_start = zero
        padded_start = zero
        T = zero + T
        S = zero + S
    t = i_tile * ROWS
    i = t + S - T
    start = mask.first_key(i)
    stop = mask.last_key(gl.minimum(t + ROWS, T) - 1 + S - T, S) + 1
    # a tile that sees nothing walks one block and finds nothing there
    first_block = gl.maximum(gl.minimum(start // KEYS, (stop - 1) // KEYS), 0)
    last_block = gl.maximum((stop - 1) // KEYS, first_block)
    return WorkTile((t < T).to(gl.int32), b, h, t, T, S, q_start, k_start, padded_start, first_block, last_block)


@gluon.jit
def _put(work_tiles: Ring, fill, i: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    work_tiles.buffers.index(fill % work_tiles.stages * WORK_TILE_WORDS + i).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def _get(work_tiles: Ring, fill, i: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(work_tiles.buffers.index(fill % work_tiles.stages * WORK_TILE_WORDS + i).load(one), 0)


@gluon.jit
def publish(work_tiles: Ring, fill, work: WorkTile):
    """Publishes a work tile to the other roles; called by one warp."""
    work_tiles.wait_empty(fill)
    _put(work_tiles, fill, 0, work.is_valid)
    _put(work_tiles, fill, 1, work.b)
    _put(work_tiles, fill, 2, work.h)
    _put(work_tiles, fill, 3, work.t)
    _put(work_tiles, fill, 4, work.T)
    _put(work_tiles, fill, 5, work.S)
    _put(work_tiles, fill, 6, work.q_start)
    _put(work_tiles, fill, 7, work.k_start)
    _put(work_tiles, fill, 8, work.padded_start)
    _put(work_tiles, fill, 9, work.first_block)
    _put(work_tiles, fill, 10, work.last_block)
    mbarrier.arrive(work_tiles.full_barrier(fill), count=1)


@gluon.jit
def publish_end(work_tiles: Ring, fill):
    """Tells the other roles that there is no tile left; the other words are an earlier tile's."""
    work_tiles.wait_empty(fill)
    _put(work_tiles, fill, 0, 0)
    mbarrier.arrive(work_tiles.full_barrier(fill), count=1)


@gluon.jit
def consume(work_tiles: Ring, fill):
    """Waits for a work tile and reads it."""
    work_tiles.wait_full(fill)
    work = WorkTile(
        _get(work_tiles, fill, 0), _get(work_tiles, fill, 1), _get(work_tiles, fill, 2), _get(work_tiles, fill, 3),
        _get(work_tiles, fill, 4),
        _get(work_tiles, fill, 5), _get(work_tiles, fill, 6), _get(work_tiles, fill, 7), _get(work_tiles, fill, 8),
        _get(work_tiles, fill, 9),
        _get(work_tiles, fill, 10),
    )  # fmt: skip
    work_tiles.release(fill)
    return work


@gluon.jit
def reset_counter(counter_ptr):
    """Leaves the counter at zero for the next launch, if no other program is still to finish."""
    is_last = gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1
    gl.store(counter_ptr, 0, mask=is_last)
    gl.store(counter_ptr + 1, 0, mask=is_last)
