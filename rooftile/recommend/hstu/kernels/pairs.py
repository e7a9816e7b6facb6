"""From a tile of products to its scores, and which pairs are seen: shared by the forward and both backward kernels."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from rooftile.exact.backends.device.visibility import MaskNumbers, first_key, first_position, last_key, last_position, visible
from rooftile.exact.backends.triton.schedule import packed_tile

# the interpreter has no library of the device
FAST = tl.constexpr(not triton.knobs.runtime.interpret)


class Numbers(NamedTuple):
    """The numbers of a call."""

    alpha: tl.tensor
    scale: tl.tensor
    by_rows: tl.tensor  # 1 where the number of the user's rows divides the sum
    left: tl.tensor
    right: tl.tensor
    prefix: tl.tensor
    chunk: tl.tensor
    contextual: tl.tensor
    zero: tl.tensor
    columns: tl.tensor  # in the table of positions
    buckets: tl.tensor  # columns of the table of times
    position_step: tl.tensor  # from a head's row of a table to the next
    time_step: tl.tensor


class UserTensors(NamedTuple):
    """The tensors of a call beside queries, keys and values."""

    cu: tl.tensor
    targets: tl.tensor
    position_table: tl.tensor
    time_table: tl.tensor
    edges: tl.tensor
    row_times: tl.tensor
    key_times: tl.tensor
    positions: tl.tensor


class User(NamedTuple):
    """A user, and a head's rows of the tables."""

    start: tl.tensor  # the first row among all rows
    n: tl.tensor  # how many rows
    end: tl.tensor  # the first target among them
    context: tl.tensor  # how many are contextual
    factor: tl.tensor  # the sum is multiplied by it
    position_row: tl.tensor
    time_row: tl.tensor


@triton.jit
def user_and_tile(slot, h, B, tensors, numbers, BLOCK: tl.constexpr, SPEC: tl.constexpr):
    """Finds the user of a slot and the number of its tile, which may lie past the user's last row."""
    b, i = packed_tile(slot, tensors.cu, B, BLOCK)
    start = tl.load(tensors.cu + b).to(tl.int64)
    n = (tl.load(tensors.cu + b + 1) - start).to(tl.int32)
    end = n
    if SPEC.TARGETS:
        end = n - tl.maximum(tl.minimum(tl.load(tensors.targets + b).to(tl.int32), n), 0)
    context = tl.minimum(numbers.contextual, end) if SPEC.CONTEXTUAL else 0 * n
    factor = tl.where(numbers.by_rows > 0, 1.0 / tl.maximum(n, 1).to(tl.float32), numbers.scale)
    position_row = tensors.position_table + h * numbers.position_step
    time_row = tensors.time_table + h * numbers.time_step
    return User(start, n, end, context, factor, position_row, time_row), i


@triton.jit
def mask_of(numbers):
    """The mask's numbers, as `visibility` takes them."""
    return MaskNumbers(numbers.left, numbers.right, numbers.prefix, numbers.chunk)


@triton.jit
def sees_of(i, j, user, numbers, SPEC: tl.constexpr):
    """Says which rows i see which keys j that are no targets; a row's own target is a pair of its own."""
    place = tl.minimum(i, user.end) - user.context
    sees = visible(place, j - user.context, user.end - user.context, mask_of(numbers), SPEC)
    if SPEC.CONTEXTUAL:
        sees = sees | (i < user.context) | (j < user.context)
    return sees & (j < user.end)


# farther than any table reaches
FAR = tl.constexpr(1 << 30)


@triton.jit
def first_place(i_0, user, tensors, SPEC: tl.constexpr):
    """Loads the position of a tile's first row or key, from which its program counts; 0 without positions of the caller's own."""
    found = user.start * 0
    if SPEC.PLACED:
        found = tl.load(tensors.positions + user.start + i_0)
    return found


@triton.jit
def places_of(i, there, origin, user, tensors, SPEC: tl.constexpr):
    """Finds the places of rows or keys, whose differences are distances: their numbers, where all targets stand behind the history.

    The caller's own positions count from `origin`, so that 32 bits hold them: a place that is clipped is far from each of the tile
    of `origin`.
    """
    place = tl.minimum(i, user.end)
    if SPEC.PLACED:
        found = tl.load(tensors.positions + user.start + i, mask=there, other=0) - origin
        place = tl.minimum(tl.maximum(found, -FAR), FAR).to(tl.int32)
    return place


@triton.jit
def column_of(distance, numbers):
    """The column of the table of positions for a distance."""
    return tl.minimum(tl.maximum(distance + numbers.zero, 0), numbers.columns - 1)


@triton.jit
def position_bias(distance, user, numbers):
    """Reads the bias of a tile of pairs from the table of positions."""
    return tl.load(user.position_row + column_of(distance, numbers)).to(tl.float32)


@triton.jit
def bucket_of(seconds, b, tensors, numbers):
    """Returns the bucket of a number of seconds; the search begins at bucket b, from which it is rarely far."""
    moves = b < numbers.buckets - 1
    while moves:
        moves = False
        if tl.load(tensors.edges + b) <= seconds:
            b += 1
            moves = b < numbers.buckets - 1
    moves = b > 0
    while moves:
        moves = False
        if tl.load(tensors.edges + b - 1) > seconds:
            b -= 1
            moves = b > 0
    return b


@triton.jit
def time_bias(x, row_times, key_times, low, high, user, tensors):
    """Adds the bias of pairs from the table of times, whose buckets go from `low` to `high`: a few, for far keys one.

    Each edge is compared with all pairs, which takes a few instructions per pair; a search or a logarithm would take more, and
    round. Times stay apart, as a row and a column: their differences would take two registers per pair.
    """
    found = tl.zeros_like(x) + tl.load(user.time_row + low).to(tl.float32)
    for b in tl.range(low, high):
        reached = row_times - tl.load(tensors.edges + b) >= key_times
        found = tl.where(reached, tl.load(user.time_row + b + 1).to(tl.float32), found)
    return x + found


# what no time reaches
NEVER = tl.constexpr(1 << 62)


@triton.jit
def times_of(pointer, i, there, user):
    """Loads the times of a tile of rows or keys, and their first and last."""
    times = tl.load(pointer + user.start + i, mask=there, other=0)
    return times, tl.min(tl.where(there, times, NEVER)), tl.max(tl.where(there, times, -NEVER))


@triton.jit
def scores(
    x,
    place_i,
    place_j,
    nearest,
    row_times,
    earliest,
    latest,
    key_times,
    first,
    last,
    low,
    high,
    user,
    tensors,
    numbers,
    SPEC: tl.constexpr,
):
    """Turns products of rows and keys, whose places and times broadcast, into scores; returns the buckets of their times, too.

    No pair is nearer than `nearest` rows, so where this is beyond the table of positions one number is read for all. With positions
    of the caller's own it is not looked at.
    """
    x = x * numbers.alpha
    if SPEC.POSITIONS:
        if SPEC.PLACED:
            x += position_bias(place_i - place_j, user, numbers)
        else:
            if nearest + numbers.zero >= numbers.columns - 1:
                x += tl.load(user.position_row + numbers.columns - 1).to(tl.float32)
            else:
                x += position_bias(place_i - place_j, user, numbers)
    if SPEC.TIMES:
        low = bucket_of(earliest - last, low, tensors, numbers)
        high = bucket_of(latest - first, high, tensors, numbers)
        x = time_bias(x, row_times, key_times, low, high, user, tensors)
    return x, low, high


@triton.jit
def own_scores(q, k, i, there, user, tensors, numbers, SPEC: tl.constexpr):
    """The scores of rows i (R,) with themselves, which targets have: products of tensors (R, D)."""
    x = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * numbers.alpha
    if SPEC.POSITIONS:
        x += position_bias(0 * i, user, numbers)
    if SPEC.TIMES:
        at = user.start + i
        row_times = tl.load(tensors.row_times + at, mask=there, other=0)
        key_times = tl.load(tensors.key_times + at, mask=there, other=0)
        x = time_bias(x, row_times, key_times, 0, numbers.buckets - 1, user, tensors)
    return x


@triton.jit
def silu(x):
    """x times its logistic function, and that function.

    An ordinary division and exponential also serve numbers below the normal ones, which takes a third of the loop's instructions.
    """
    grown = 1.0 + tl.exp2(x * -1.4426950408889634)
    gate = libdevice.fast_dividef(1.0, grown) if FAST else 1.0 / grown
    return x * gate, gate


@triton.jit
def slope(x, gate):
    """The derivative of silu at x, whose logistic function is `gate`."""
    return gate * (1.0 + x * (1.0 - gate))


class Walk(NamedTuple):
    """The tiles of the other side that a tile walks: masked ones in three stretches, and clear ones, whose pairs are all seen."""

    context: tl.tensor  # how many masked tiles begin at 0, for the contextual rows
    start: tl.tensor
    left: tl.tensor  # how many masked tiles begin at `start`
    clear_start: tl.tensor
    clear: tl.tensor  # how many clear tiles
    clear_stop: tl.tensor
    right: tl.tensor  # how many masked tiles begin at `clear_stop`


@triton.jit
def keys_of(i_0, user, numbers, SPEC: tl.constexpr):
    """Finds the keys that some row of a tile from i_0 on sees, and those that all see; targets' own rows aside."""
    mask = mask_of(numbers)
    c = user.context
    history = user.end - c
    top = tl.maximum(tl.minimum(i_0, user.end) - c, 0)
    bottom = tl.minimum(tl.minimum(i_0 + SPEC.ROWS, user.n) - 1, user.end) - c
    start = first_key(top, mask, SPEC) + c
    stop = tl.minimum(last_key(bottom, history, mask, SPEC) + 1, history) + c
    clear_start = first_key(tl.maximum(bottom, 0), mask, SPEC)
    # no bound to the left: contextual keys are seen, too
    clear_start = tl.where(clear_start > 0, clear_start + c, 0)
    clear_stop = tl.minimum(last_key(top, history, mask, SPEC) + 1, history) + c
    if SPEC.CONTEXTUAL:
        # a contextual row sees all, and beside it rows of the history do not
        mixed = i_0 < c
        start = tl.where(mixed, 0, start)
        stop = tl.where(mixed, user.end, tl.maximum(stop, c))
        clear_stop = tl.where(mixed, 0, clear_stop)
    return _walk(c, start, stop, clear_start, clear_stop, SPEC.KEYS)


@triton.jit
def rows_of(j_0, user, numbers, SPEC: tl.constexpr):
    """Finds the rows that see some key of a tile from j_0 on, and those that see all of them; targets' own keys aside."""
    mask = mask_of(numbers)
    c = user.context
    history = user.end - c
    top = tl.maximum(j_0 - c, 0)
    bottom = tl.minimum(j_0 + SPEC.KEYS, user.end) - 1 - c
    start = tl.maximum(first_position(top, mask, SPEC), 0) + c
    # a position behind the history is every target's
    last = last_position(tl.maximum(bottom, 0), mask, SPEC)
    stop = tl.where(last >= history, user.n, last + 1 + c)
    clear_start = tl.maximum(first_position(tl.maximum(bottom, 0), mask, SPEC), 0) + c
    last = last_position(top, mask, SPEC)
    clear_stop = tl.where(last >= history, user.n, last + 1 + c)
    if SPEC.CONTEXTUAL:
        mixed = j_0 < c
        start = tl.where(mixed, 0, start)
        stop = tl.where(mixed, user.n, stop)
        clear_stop = tl.where(mixed, 0, clear_stop)
    # keys past the end are not seen
    clear_stop = tl.where(j_0 + SPEC.KEYS > user.end, 0, clear_stop)
    stop = tl.where(j_0 < user.end, stop, 0)
    return _walk(tl.where(j_0 < user.end, c, 0), start, stop, clear_start, clear_stop, SPEC.ROWS)


@triton.jit
def _walk(context, start, stop, clear_start, clear_stop, BLOCK: tl.constexpr):
    """Rounds ranges to tiles: [start, stop), and the clear range within it; [0, context) comes before."""
    start = start // BLOCK * BLOCK
    stop = tl.maximum(stop, start)
    end = start + tl.cdiv(stop - start, BLOCK) * BLOCK
    clear_start = tl.minimum(tl.maximum(tl.cdiv(clear_start, BLOCK) * BLOCK, start), end)
    clear_stop = tl.minimum(tl.maximum(clear_stop // BLOCK * BLOCK, clear_start), end)
    before = tl.minimum(tl.cdiv(context, BLOCK), start // BLOCK)
    left = (clear_start - start) // BLOCK
    clear = (clear_stop - clear_start) // BLOCK
    return Walk(before, start, left, clear_start, clear, clear_stop, (end - clear_stop) // BLOCK)


@triton.jit
def tile_at(m, walk, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The first row or key of tile number m of a walk's masked tiles, or of its clear ones."""
    if MASKED:
        low = walk.start + (m - walk.context) * BLOCK
        high = walk.clear_stop + (m - walk.context - walk.left) * BLOCK
        return tl.where(m < walk.context, m * BLOCK, tl.where(m < walk.context + walk.left, low, high))
    return walk.clear_start + m * BLOCK
