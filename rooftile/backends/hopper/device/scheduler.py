"""Which tile of which head a program takes next, and what that tile needs.

A program stays on its multiprocessor and takes one tile after another. Numbers are drawn from a counter in memory: who
finishes early draws again. The tiles are numbered head by head, so that the programs at work share few heads, whose keys and
values are read from memory once and then found in the L2 cache. The last heads are taken together, the tiles with the most
work first, so that at the end no program is left with a long one.

Packed sequences: sequence b owns the slots from cu[b] // ROWS + b on. That is never fewer than its tiles, and needs no prefix
sum and no word from the host; a slot past a sequence's end is skipped. Which of the last tiles has how much work is found by
the warp that draws it, from the lengths of all sequences, a lane each.
"""

from rooftile.backends.hopper.device.mask import first_key, first_position, last_key, last_position
from rooftile.backends.hopper.device.pipeline import Ring
from rooftile.backends.hopper.gluon import aggregate, gl, gluon, mbarrier

# int32s of shared memory for a plan: a power of two, as every shape here
WORDS = gl.constexpr(16)
# the most packed sequences whose tiles are put in the order of their work: a lane each
MOST_SORTED = gl.constexpr(32)
# what the backward pads sequences of queries to: the largest of its blocks
PADDED = gl.constexpr(128)


@aggregate
class Plan:
    """One tile of queries and the keys that it walks."""

    live: gl.tensor  # 0: there is no tile left
    b: gl.tensor  # packed: 0
    h: gl.tensor
    t: gl.tensor  # the tile's first query, within its sequence
    T: gl.tensor  # the lengths of its sequence
    S: gl.tensor
    row: gl.tensor  # packed: where the sequence begins among the queries and the keys; of keys in pages the sequence's number
    key: gl.tensor
    padded: gl.tensor  # packed: where it begins when each sequence's queries are padded to a multiple of 128
    first: gl.tensor  # the blocks it walks: for queries those of keys, from last down to first, both included
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, live, b, h, t, T, S, row, key, padded, first, last):
        self.live = live
        self.b = b
        self.h = h
        self.t = t
        self.T = T
        self.S = S
        self.row = row
        self.key = key
        self.padded = padded
        self.first = first
        self.last = last


@aggregate
class Mask:
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
def dense_tile(n, tiles, heads, tail):
    """The (head of the batch, tile) of number n: head by head, but the last `tail` heads together, longest tiles first."""
    alone = (heads - tail) * tiles
    rank = n - alone
    i_head = gl.where(rank < 0, n // tiles, heads - tail + rank % gl.maximum(tail, 1))
    i_tile = gl.where(rank < 0, n % tiles, rank // gl.maximum(tail, 1))
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
def _at_least(work, tiles, top, SLOPED: gl.constexpr):
    """How many tiles of each sequence have at least so much work."""
    if SLOPED:
        found = gl.minimum(gl.maximum(top - work + 1, 0), tiles)
    else:
        found = gl.where(top >= work, tiles, 0)
    return gl.where(work <= 0, tiles, found)


@gluon.jit
def tile_by_work(rank, cu_own_ptr, cu_walked_ptr, B, ROWS: gl.constexpr, SLOPED: gl.constexpr, LENGTHS: gl.constexpr = False):
    """The (sequence, rank within it) of the tile with that rank by work, the most first; a rank of -1 past the last.

    Own is what tiles of ROWS are cut from, and the walked is what each one walks. SLOPED: the first in its sequence walks all of
    it, and every next one ROWS fewer; else all the same. For at most MOST_SORTED sequences, by one warp. LENGTHS: of the walked
    there are lengths, and no offsets.
    """
    lane = gl.arange(0, MOST_SORTED, gl.BlockedLayout([1], [32], [1], [0]))
    there = lane < B
    own = gl.load(cu_own_ptr + lane + 1, mask=there, other=0) - gl.load(cu_own_ptr + lane, mask=there, other=0)
    if LENGTHS:
        walked = gl.load(cu_walked_ptr + lane, mask=there, other=0)
    else:
        walked = gl.load(cu_walked_ptr + lane + 1, mask=there, other=0) - gl.load(cu_walked_ptr + lane, mask=there, other=0)
    tiles = (own.to(gl.int32) + (ROWS - 1)) // ROWS
    top = (walked.to(gl.int32) + (ROWS - 1)) // ROWS
    # the most work that more than `rank` tiles have
    work = 0
    high = gl.max(top, 0) + 1
    while high - work > 1:
        middle = (work + high) // 2
        if gl.sum(_at_least(middle, tiles, top, SLOPED), 0) > rank:
            work = middle
        else:
            high = middle
    before = _at_least(work + 1, tiles, top, SLOPED)
    equal = _at_least(work, tiles, top, SLOPED) - before
    rest = rank - gl.sum(before, 0)
    skipped = gl.associative_scan(equal, 0, _add) - equal
    mine = (rest >= skipped) & (rest < skipped + equal)
    return gl.sum(gl.where(mine, lane, 0), 0), gl.sum(gl.where(mine, before + rest - skipped + 1, 0), 0) - 1


@gluon.jit
def padded_row(i_b, row):
    """Where sequence i_b begins if each one's queries are padded: at least where those before it end."""
    return (row // PADDED + i_b) * PADDED


@gluon.jit
def make_plan(
    n, B, H, T, S, tiles, tail, cu_q_ptr, cu_k_ptr, mask, ROWS: gl.constexpr, KEYS: gl.constexpr, PACKED: gl.constexpr,
    PAGED: gl.constexpr = False,
):  # fmt: skip
    """The plan of tile number n, which is below the number of tiles; not live if its slot is past its sequence's end.

    PAGED: packed queries, and keys in pages: cu_k_ptr has lengths, and a plan's `key` is the sequence's number.
    """
    zero = n * 0
    if PACKED:
        h, slot = dense_tile(n, tiles, H, tail)
        if (n >= (H - tail) * tiles) & (B <= MOST_SORTED):
            i_b, rank = tile_by_work(tiles - 1 - slot, cu_q_ptr, cu_k_ptr, B, ROWS, mask.SLOPED, PAGED)
            last = (gl.load(cu_q_ptr + i_b + 1).to(gl.int32) - gl.load(cu_q_ptr + i_b).to(gl.int32) - 1) // ROWS
            i_tile = gl.where(rank < 0, last + 1, last - rank)
        else:
            i_b, i_tile = packed_tile(tiles - 1 - slot, cu_q_ptr, B, ROWS)
        row = gl.load(cu_q_ptr + i_b).to(gl.int32)
        T = gl.load(cu_q_ptr + i_b + 1).to(gl.int32) - row
        if PAGED:
            key = i_b
            S = gl.load(cu_k_ptr + i_b)
        else:
            key = gl.load(cu_k_ptr + i_b).to(gl.int32)
            S = gl.load(cu_k_ptr + i_b + 1).to(gl.int32) - key
        b = zero
        padded = padded_row(i_b, row)
    else:
        i_bh, i_tile = dense_tile(n, tiles, B * H, tail)
        b = i_bh // H
        h = i_bh % H
        row = zero
        key = zero
        padded = zero
        T = zero + T
        S = zero + S
    t = i_tile * ROWS
    i = t + S - T
    start = mask.first_key(i)
    stop = mask.last_key(gl.minimum(t + ROWS, T) - 1 + S - T, S) + 1
    # a tile that sees nothing walks one block and finds nothing there
    first = gl.maximum(gl.minimum(start // KEYS, (stop - 1) // KEYS), 0)
    last = gl.maximum((stop - 1) // KEYS, first)
    return Plan((t < T).to(gl.int32), b, h, t, T, S, row, key, padded, first, last)


@gluon.jit
def _put(plans: Ring, turn, i: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    plans.buffers.index(turn % plans.slots * WORDS + i).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def _get(plans: Ring, turn, i: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(plans.buffers.index(turn % plans.slots * WORDS + i).load(one), 0)


@gluon.jit
def publish(plans: Ring, turn, plan: Plan):
    """Tells the other roles of a tile; by one warp."""
    plans.wait_empty(turn)
    _put(plans, turn, 0, plan.live)
    _put(plans, turn, 1, plan.b)
    _put(plans, turn, 2, plan.h)
    _put(plans, turn, 3, plan.t)
    _put(plans, turn, 4, plan.T)
    _put(plans, turn, 5, plan.S)
    _put(plans, turn, 6, plan.row)
    _put(plans, turn, 7, plan.key)
    _put(plans, turn, 8, plan.padded)
    _put(plans, turn, 9, plan.first)
    _put(plans, turn, 10, plan.last)
    mbarrier.arrive(plans.filled(turn), count=1)


@gluon.jit
def publish_end(plans: Ring, turn):
    """Tells the other roles that there is no tile left; the rest of the plan is an old one's."""
    plans.wait_empty(turn)
    _put(plans, turn, 0, 0)
    mbarrier.arrive(plans.filled(turn), count=1)


@gluon.jit
def take(plans: Ring, turn):
    """The plan of a turn, once it is published."""
    plans.wait_full(turn)
    plan = Plan(
        _get(plans, turn, 0), _get(plans, turn, 1), _get(plans, turn, 2), _get(plans, turn, 3), _get(plans, turn, 4),
        _get(plans, turn, 5), _get(plans, turn, 6), _get(plans, turn, 7), _get(plans, turn, 8), _get(plans, turn, 9),
        _get(plans, turn, 10),
    )  # fmt: skip
    plans.give_back(turn)
    return plan


@gluon.jit
def put_back(counter_ptr):
    """Leaves the counter at zero for the next launch, if no other program is still to finish."""
    last = gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1
    gl.store(counter_ptr, 0, mask=last)
    gl.store(counter_ptr + 1, 0, mask=last)
