"""How programs share a product, and how the parts of a tile are added.

All steps over K of all tiles stand in one line, tile by tile, and each program takes a contiguous run of it, of the same length
up to one step: no multiprocessor idles, however few tiles there are (stream-K). A run takes the end of one tile, whole tiles,
and the beginning of another. A tile that several programs share is added by the last of them to finish, in the order of K.

Tiles of the rows of x stand in the line, too (`spread`), since parts of sums cost more than reading a weight again from the L2
cache. Under `deterministic` they do not: runs follow from N, K and the number of programs alone, and a program walks through the
rows of x within each tile, so the order of a row's sum is the same in every batch.

Osama et al., Stream-K, arXiv:2301.03598.
"""

from typing import NamedTuple

from rooftile.runtime.hopper.gluon import aggregate, barrier, gl, gluon, mbarrier, tma_load
from rooftile.runtime.hopper.pipeline import Ring, let_next_begin, wait_for_input

# numbers of K per step, and rows of a warpgroup's matrix instruction
STEP, ROWS = gl.constexpr(128), gl.constexpr(64)
# warpgroups of a program that multiply
WARPGROUPS = 2


class ProductTile(NamedTuple):
    """A program's tile."""

    BLOCKS_N: int  # times 64: a warpgroup's rows of the weight
    COLUMNS: int  # rows of x that one matrix instruction takes
    BLOCKS_M: int  # ... and how many times that many a tile has
    STAGES: int

    @property
    def block_n(self) -> int:
        """Rows of the weight."""
        return 64 * WARPGROUPS * self.BLOCKS_N

    @property
    def block_m(self) -> int:
        """Rows of x."""
        return self.COLUMNS * self.BLOCKS_M

    @property
    def blocks(self) -> int:
        """Sums of 64 x COLUMNS."""
        return WARPGROUPS * self.BLOCKS_N * self.BLOCKS_M


@aggregate
class TiledProduct:
    """A product's results and sizes, and the compile-time sizes of its tiles (`ProductTile`)."""

    o: gl.tensor  # pointers: (M, N); the bias (N,); partials and counters of tiles that several programs share
    bias: gl.tensor
    partials: gl.tensor
    counters: gl.tensor
    M: gl.tensor
    N: gl.tensor
    tiles: gl.tensor  # in the line
    steps: gl.tensor  # over K
    spread: gl.tensor  # tiles of rows of x that stand in the line for each tile of N: all or one
    BIAS: gl.constexpr
    WARPGROUPS: gl.constexpr
    BLOCKS_N: gl.constexpr
    COLUMNS: gl.constexpr
    BLOCKS_M: gl.constexpr
    BLOCKS: gl.constexpr  # sums of 64 x COLUMNS that a tile has
    BLOCK_N: gl.constexpr
    BLOCK_M: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, o, bias, partials, counters, M, N, tiles, steps, spread, BIAS, T):
        # newer Tritons keep a tile's fields, and not its properties
        self.o = o
        self.bias = bias
        self.partials = partials
        self.counters = counters
        self.M = M
        self.N = N
        self.tiles = tiles
        self.steps = steps
        self.spread = spread
        self.BIAS = gl.constexpr(BIAS)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.BLOCKS_N = gl.constexpr(T.BLOCKS_N)
        self.COLUMNS = gl.constexpr(T.COLUMNS)
        self.BLOCKS_M = gl.constexpr(T.BLOCKS_M)
        self.BLOCKS = gl.constexpr(WARPGROUPS * T.BLOCKS_N * T.BLOCKS_M)
        self.BLOCK_N = gl.constexpr(64 * WARPGROUPS * T.BLOCKS_N)
        self.BLOCK_M = gl.constexpr(T.COLUMNS * T.BLOCKS_M)
        self.STAGES = gl.constexpr(T.STAGES)

    @gluon.jit
    def tiles_of_rows(self):
        return (self.M + self.BLOCK_M - 1) // self.BLOCK_M

    @gluon.jit
    def bounds(self):
        """The first step of this program's run in the line of all tiles' steps, and one past its last."""
        total = self.tiles * self.steps
        program = gl.program_id(0)
        return program * total // gl.num_programs(0), (program + 1) * total // gl.num_programs(0)

    @gluon.jit
    def run_at(self, place, end):
        """The run that begins at a step of the line."""
        tile, first = place // self.steps, place % self.steps
        # programs with the same rows of the weight, and other rows of x, are there at the same time: then memory is read once
        across = self.tiles // self.spread
        tile_m = tile // across
        return Run(tile, tile - tile_m * across, tile_m, first, gl.minimum(self.steps, first + end - place))

    @gluon.jit
    def program_of(self, step):
        """The program whose run has this step of the line: the largest p with floor(p total / programs) <= step."""
        return ((step + 1) * gl.num_programs(0) - 1) // (self.tiles * self.steps)

    @gluon.jit
    def partial(self, program, begins, tile_m, block):
        """Returns a partial's address: each program keeps two, of the tile it starts and of the tile it joins midway."""
        which = (tile_m // self.spread * gl.num_programs(0) + program) * 2 + begins
        return self.partials + (which * self.BLOCKS + block).to(gl.int64) * (ROWS * self.COLUMNS)


@aggregate
class Run:
    """The steps of one tile that a program takes at once."""

    tile: gl.tensor  # in the line
    tile_n: gl.tensor
    tile_m: gl.tensor  # the first of its tiles of rows of x; those after it follow each `spread`
    first: gl.tensor  # the first step over K, and one past the last
    stop: gl.tensor


@gluon.jit
def _load_weight(w_desc, tiles: Ring, fill, run: Run, step, SIZE: gl.constexpr, to: TiledProduct, more_desc, more):
    """Has a tile of the weight copied in; SIZE counts its bytes and the bytes of x.

    Where a copy is half a tile, the first half has gates, and the other as many rows from `to.N` on. `more` is what else there
    is of the weight, or None.
    """
    TILE: gl.constexpr = w_desc.block_type.shape[0]
    # two codes of 4 bits share a column of the weight
    COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
    full = tiles.full_barrier(fill)
    w = tiles.buffer(fill)
    mbarrier.expect(full, SIZE)
    if to.BLOCK_N == 2 * TILE:
        tma_load(w_desc, [run.tile_n * TILE, step * COLUMNS], full, w.slice(0, TILE, 0))
        tma_load(w_desc, [to.N + run.tile_n * TILE, step * COLUMNS], full, w.slice(TILE, TILE, 0))
    else:
        tma_load(w_desc, [run.tile_n * TILE, step * COLUMNS], full, w)
    if more_desc is not None:
        tma_load(more_desc, [run.tile_n * TILE, step * more_desc.block_type.shape[1]], full, more.index(fill % to.STAGES))


@gluon.jit
def load(w_desc, x_desc, tiles: Ring, xs, to: TiledProduct, early, more_desc=None, more=None):
    """Runs the role that starts the copies of weight tiles, x tiles and the rest of the weight (`more`) into shared memory.

    `early`: the kernel before does not write the weight, so the ring fills with its tiles while that kernel ends.
    """
    COPIES: gl.constexpr = to.BLOCK_N // w_desc.block_type.shape[0]
    MORE: gl.constexpr = 0 if more_desc is None else more_desc.block_type.nbytes
    SIZE: gl.constexpr = COPIES * w_desc.block_type.nbytes + x_desc.block_type.nbytes + MORE
    place, end = to.bounds()
    ahead = 0
    if early != 0:
        soon = place
        while (soon < end) & (ahead < to.STAGES):
            run = to.run_at(soon, end)
            for _ in range(run.tile_m, to.tiles_of_rows(), to.spread):
                for step in range(run.first, gl.minimum(run.stop, run.first + to.STAGES - ahead)):
                    _load_weight(w_desc, tiles, ahead, run, step, SIZE, to, more_desc, more)
                    ahead += 1
            soon += run.stop - run.first
    wait_for_input()
    let_next_begin()
    fill = 0
    while place < end:
        run = to.run_at(place, end)
        for tile_m in range(run.tile_m, to.tiles_of_rows(), to.spread):
            for step in range(run.first, run.stop):
                if fill >= ahead:
                    tiles.wait_empty(fill)
                    _load_weight(w_desc, tiles, fill, run, step, SIZE, to, more_desc, more)
                tma_load(
                    x_desc, [tile_m * to.BLOCK_M, step * STEP], tiles.full_barrier(fill), xs.index(fill % to.STAGES)
                )  # fmt: skip
                fill += 1
        place += run.stop - run.first


@gluon.jit
def _flattened(acc, to: TiledProduct):
    """A block's numbers (64, COLUMNS) so that a thread has four side by side, and its neighbours those beside them."""
    parts = acc.reshape([4, 2, 8, to.COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return parts.reshape([to.COLUMNS // 8, ROWS * 8])


@gluon.jit
def _in_rows(flat, layout: gl.constexpr, to: TiledProduct):
    """Undoes `_flattened`; no number changes its thread."""
    parts = flat.reshape([to.COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(parts.reshape([ROWS, to.COLUMNS]), layout)


@gluon.jit
def _part(to: TiledProduct, program, last, tile_m, block, place):
    """A program's part of a tile that began before it; zeros past the last program that has one."""
    return gl.load(to.partial(program, 0, tile_m, block) + place, mask=program <= last, other=0, cache_modifier=".cg")


@gluon.jit
def _sum_of_parts(start, last, tile_m, block, place, to: TiledProduct):
    """The parts of all programs that share a tile, added in the order of K."""
    acc = gl.load(to.partial(start, 1, tile_m, block) + place, cache_modifier=".cg")
    # a program loads as many at a time as its registers hold, and waits once for all of them
    AT_ONCE: gl.constexpr = 4 if to.COLUMNS <= 64 else 2 if to.COLUMNS == 128 else 1
    for program in range(start + 1, last + 1, AT_ONCE):
        first = _part(to, program, last, tile_m, block, place)
        if AT_ONCE > 1:
            second = _part(to, program + 1, last, tile_m, block, place)
        if AT_ONCE == 4:
            third = _part(to, program + 2, last, tile_m, block, place)
            fourth = _part(to, program + 3, last, tile_m, block, place)
        acc += first
        if AT_ONCE > 1:
            acc += second
        if AT_ONCE == 4:
            acc += third
            acc += fourth
    return acc


@gluon.jit
def _places(flat, to: TiledProduct):
    """Places of a block's numbers in its partial."""
    layout: gl.constexpr = flat.type.layout
    row = gl.arange(0, to.COLUMNS // 8, gl.SliceLayout(1, layout))
    column = gl.arange(0, ROWS * 8, gl.SliceLayout(0, layout))
    return gl.expand_dims(row * (ROWS * 8), 1) + gl.expand_dims(column, 0)


@gluon.jit
def _put_part(flat, run: Run, tile_m, block, place, to: TiledProduct):
    """Writes this program's part of a block."""
    gl.store(to.partial(gl.program_id(0), (run.first == 0).to(gl.int32), tile_m, block) + place, flat)


@gluon.jit
def _count(run: Run, tile_m, block, to: TiledProduct):
    """Counts this program's part; returns the first and last program that share the tile, and whether all have counted."""
    # all threads have written before one of them says so
    barrier()
    counter = to.counters + ((tile_m // to.spread * to.tiles + run.tile) * to.BLOCKS + block)
    before = gl.atomic_add(counter, 1)
    start = to.program_of(run.tile * to.steps)
    last = to.program_of(run.tile * to.steps + to.steps - 1)
    is_last = before == last - start
    if is_last:
        # zero again for the next launch
        gl.store(counter, 0)
    return start, last, is_last


@gluon.jit
def whole_sum(acc, run: Run, tile_m, block, to: TiledProduct):
    """Returns a block's sum over all K, and whether this program has it: the last to finish of those that share the tile."""
    layout: gl.constexpr = acc.type.layout
    has_it = run.stop - run.first == to.steps
    if not has_it:
        flat = _flattened(acc, to)
        place = _places(flat, to)
        _put_part(flat, run, tile_m, block, place, to)
        start, last, has_it = _count(run, tile_m, block, to)
        if has_it:
            acc = _in_rows(_sum_of_parts(start, last, tile_m, block, place, to), layout, to)
    return acc, has_it


@gluon.jit
def whole_pair(acc, acc_2, run: Run, tile_m, block, to: TiledProduct):
    """`whole_sum` of a block and the one after it, both by the same program."""
    layout: gl.constexpr = acc.type.layout
    has_it = run.stop - run.first == to.steps
    if not has_it:
        flat = _flattened(acc, to)
        place = _places(flat, to)
        _put_part(flat, run, tile_m, block, place, to)
        _put_part(_flattened(acc_2, to), run, tile_m, block + 1, place, to)
        start, last, has_it = _count(run, tile_m, block, to)
        if has_it:
            acc = _in_rows(_sum_of_parts(start, last, tile_m, block, place, to), layout, to)
            acc_2 = _in_rows(_sum_of_parts(start, last, tile_m, block + 1, place, to), layout, to)
    return acc, acc_2, has_it


@gluon.jit
def write(y, n_0, m_0, to: TiledProduct):
    """Adds the bias to results (64, COLUMNS), and writes them to o (M, N): rows of the weight are its columns."""
    put(with_bias(y, n_0, to.N, to), n_0, m_0, to)


@gluon.jit
def with_scales(y, n_0, m_0, x_scales_ptr, w_scales_ptr, end, to: TiledProduct):
    """Sums (64, COLUMNS) times the scales of their rows of x and of the weight, which has rows up to `end`."""
    of_y: gl.constexpr = y.type.layout
    m = m_0 + gl.arange(0, to.COLUMNS, gl.SliceLayout(0, of_y))
    n = n_0 + gl.arange(0, ROWS, gl.SliceLayout(1, of_y))
    y = y * gl.expand_dims(gl.load(x_scales_ptr + m, mask=m < to.M, other=0.0), 0)
    return y * gl.expand_dims(gl.load(w_scales_ptr + n, mask=n < end, other=0.0).to(gl.float32), 1)


@gluon.jit
def with_bias(y, n_0, end, to: TiledProduct):
    """Results (64, COLUMNS) plus the bias of their rows of the weight, which has rows up to `end`."""
    if to.BIAS:
        of_y: gl.constexpr = y.type.layout
        n = n_0 + gl.arange(0, ROWS, gl.SliceLayout(1, of_y))
        y = y + gl.expand_dims(gl.load(to.bias + n, mask=n < end, other=0.0).to(gl.float32), 1)
    return y


@gluon.jit
def put(y, n_0, m_0, to: TiledProduct):
    """Writes results (64, COLUMNS) to o (M, N)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    y = gl.convert_layout(y.to(to.o.dtype.element_ty).permute((1, 0)), layout)
    m = m_0 + gl.arange(0, to.COLUMNS, gl.SliceLayout(1, layout))
    n = n_0 + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    there = gl.expand_dims(m < to.M, 1) & gl.expand_dims(n < to.N, 0)
    gl.store(to.o + (gl.expand_dims(m.to(gl.int64) * to.N, 1) + gl.expand_dims(n, 0)), y, mask=there)
