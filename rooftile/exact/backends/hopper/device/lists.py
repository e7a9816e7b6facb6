"""Lists of key blocks on Hopper: the load warp follows a tile's list and tells the others where each block of keys begins.

A step is a block of keys of the kernel's own size; a listed block is one or more of them. For each step the load warp puts a word
beside the keys: the block's number, and whether the mask or the end of the keys cuts it. So the warps that compute read no list.
Where some blocks are seen in part, a second word says which bits are the step's.
"""

from rooftile.exact.backends.hopper.device.config import WG_ROWS, KernelConfig
from rooftile.exact.backends.hopper.device.scheduler import PADDED, MaskBounds
from rooftile.runtime.hopper.gluon import aggregate, gl, gluon, mbarrier, tma_load
from rooftile.runtime.hopper.pipeline import Ring


@aggregate
class BlockLists:
    """Lists of blocks of T queries and S keys, by queries or by keys: (batch, head, block, most)."""

    counts: gl.tensor  # pointers
    indices: gl.tensor
    bits: gl.tensor
    batch_stride: gl.tensor  # in lists; 0: shared
    head_stride: gl.tensor
    per: gl.tensor  # query heads that share a list
    most: gl.tensor
    part: gl.tensor  # how many blocks of a list of queries have bits
    bits_batch_stride: gl.tensor  # as above, of the lists of queries
    bits_head_stride: gl.tensor
    T: gl.constexpr
    S: gl.constexpr
    BITS: gl.constexpr  # whether some blocks have bits

    @gluon.jit
    def of_queries(self, work):
        """The entries of a tile of queries, blocks of keys, and how many there are."""
        number = self.number_of_queries(work)
        count = gl.maximum(gl.minimum(gl.load(self.counts + number), self.most), 0)
        return self.indices + number * self.most, count

    @gluon.jit
    def number_of_queries(self, work):
        """The number of the list of a tile of queries."""
        return list_number(work, work.h, work.q_start, self.batch_stride, self.head_stride, self.per, self.T)

    @gluon.jit
    def place_among_bits(self, work, h, block, place):
        """The place of a block, which is the `place`-th in the list of a block of queries, among all that have bits, or -1."""
        sequence = work.padded_start // PADDED - work.q_start // PADDED
        number = work.b * self.bits_batch_stride + h // self.per * self.bits_head_stride
        number += work.q_start // self.T + sequence + block
        return gl.where(place < self.part, number * self.part + place, -1)

    @gluon.jit
    def hide_by_bits_transposed(self, s, place, t, j):
        """Scores of 64 keys from j on by 64 queries from t on, with -inf where a bit of the block is not set."""
        WORDS: gl.constexpr = self.S // 32
        parts = s.reshape([2, 32, 64])
        layout: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        group = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, layout)), 1)
        query = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
        first = (place.to(gl.int64) * self.T + t % self.T) * WORDS + j % self.S // 32
        words = gl.expand_dims(gl.load(self.bits + first + query * WORDS + group), 1)
        key = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout)))
        sees = (words >> gl.expand_dims(gl.expand_dims(key, 0), 2)) & 1
        return gl.convert_layout(gl.where(sees != 0, parts, float("-inf")).reshape([64, 64]), s.type.layout)

    @gluon.jit
    def bits_of_step(self, word, place, row, config: KernelConfig):
        """The bits of a warpgroup's rows, from `row` on, and a step's keys: (rows, keys / 32) words.

        place: the block's place among all that have bits; below 0: it is seen whole, and all bits are set.
        """
        WORDS: gl.constexpr = self.S // 32
        parts = gl.zeros([WG_ROWS, config.KEYS], gl.int32, config.s_layout).reshape([WG_ROWS, config.KEYS // 32, 4, 4, 2])
        layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, parts.type.layout)))
        rows = gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
        columns = gl.arange(0, config.KEYS // 32, gl.SliceLayout(0, layout))
        offsets = gl.expand_dims(rows * WORDS, 1) + gl.expand_dims(columns, 0)
        first = (place.to(gl.int64) * self.T + row % self.T) * WORDS + word // 2 * config.KEYS % self.S // 32
        return gl.load(self.bits + first + offsets, mask=offsets * 0 + place >= 0, other=-1)

    @gluon.jit
    def of_keys(self, work, h):
        """The entries of a tile of keys and query head h, pairs that begin with a block of queries, and how many there are."""
        number = list_number(work, h, work.k_start, self.batch_stride, self.head_stride, self.per, self.S)
        count = gl.maximum(gl.minimum(gl.load(self.counts + number), self.most), 0)
        return self.indices + number * self.most * 2, count


@gluon.jit
def list_number(work, h, start, batch_stride, head_stride, per, size):
    """The number of a tile's list for query head h, of blocks of `size`; packed, its sequence begins at `start`."""
    # packed: sequence i has the lists from start // size + i on, and its padded rows begin at (q_start // PADDED + i) * PADDED
    sequence = work.padded_start // PADDED - work.q_start // PADDED
    block = start // size + sequence + work.t // size
    return work.b.to(gl.int64) * batch_stride + (h // per).to(gl.int64) * head_stride + block


@gluon.jit
def count_steps(
    entries, count, length, first_block, last_block, PER: gl.constexpr, SIZE: gl.constexpr, STEP: gl.constexpr = 1
):  # fmt: skip
    """How many steps of a list lie from first_block to last_block; called by one warp.

    An entry is a block of SIZE out of `length`, PER steps; entries are STEP words apart.
    """
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    blocks = (length + (SIZE - 1)) // SIZE
    found = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    for start in range(0, count, 32):
        index = gl.load(entries + (start + lane) * STEP, mask=start + lane < count, other=-1)
        is_there = (index >= 0) & (index < blocks)
        first = gl.where(is_there, index, 0) * PER
        seen = gl.minimum(first + (PER - 1), last_block) - gl.maximum(first, first_block) + 1
        found += gl.where(is_there, gl.maximum(seen, 0), 0)
    return gl.sum(found, 0)


@gluon.jit
def write_word(words, i, value):
    """Writes word number i; called by one warp."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    words.index(i).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def _load_step(keys: Ring, values: Ring, words, k_desc, v_desc, fill, work, block, cut, place, config: KernelConfig):
    """Has one block of keys and values copied in, with its words."""
    h = work.h // config.GROUP
    row = work.k_start + block * config.KEYS
    keys.wait_empty(fill)
    write_word(words, fill % keys.stages, 2 * block + cut)
    if config.LIST_BITS:
        write_word(words, keys.stages + fill % keys.stages, place)
    mbarrier.expect(keys.full_barrier(fill), k_desc.block_type.nbytes)
    tma_load(k_desc, [work.b, h, row, 0], keys.full_barrier(fill), keys.buffer(fill))
    values.wait_empty(fill)
    mbarrier.expect(values.full_barrier(fill), v_desc.block_type.nbytes)
    tma_load(v_desc, [work.b, h, row, 0], values.full_barrier(fill), values.buffer(fill))


@gluon.jit
def load_listed(
    keys: Ring, values: Ring, words, k_desc, v_desc, fill, work, lists: BlockLists, mask: MaskBounds, steps, first_block,
    last_block, counter_ptr, config: KernelConfig,
):  # fmt: skip
    """Has the steps of a tile's list copied in; returns the next fill, and how many tiles were drawn before the next one."""
    PER: gl.constexpr = lists.S // config.KEYS
    entries, count = lists.of_queries(work)
    blocks = (work.S + (lists.S - 1)) // lists.S
    # a block that no query sees lies past the last key
    nothing = (work.S + (config.KEYS - 1)) // config.KEYS
    i = work.t + work.S - work.T
    clear_first = mask.first_key(i + (config.NUM_CONSUMERS * config.ROWS - 1))
    clear_last = mask.last_key(i, work.S)
    left = steps
    # a mask's bits take at most 1 GiB, so 32 bits count their blocks
    first_place = lists.number_of_queries(work).to(gl.int32) * lists.part
    n = 0
    for step in range(count * PER):
        index = gl.load(entries + step // PER)
        is_there = (index >= 0) & (index < blocks)
        block = gl.where(is_there, gl.where(is_there, index, 0) * PER + step % PER, nothing)
        is_seen = True
        if config.MASKED:
            is_seen = is_there & (block >= first_block) & (block <= last_block)
        if is_seen:
            left -= 1
            if left == 0:
                n = gl.atomic_add(counter_ptr, 1, sem="relaxed")
            cut = (block * config.KEYS < clear_first) | (block * config.KEYS + (config.KEYS - 1) > clear_last)
            place = gl.where(step // PER < lists.part, first_place + step // PER, -1)
            _load_step(keys, values, words, k_desc, v_desc, fill, work, block, cut.to(gl.int32), place, config)
            fill += 1
    if steps == 0:
        n = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        _load_step(keys, values, words, k_desc, v_desc, fill, work, nothing, 1, -1, config)
        fill += 1
    return fill, n


@gluon.jit
def read_word(words, i):
    """Word number i, which another warp has written."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.index(i).load(one), 0)
