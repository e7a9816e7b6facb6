"""Work tiles of users, and the weights of pairs: shared by the forward and both backward kernels.

A work tile's T is the number of a user's rows, and its S the number of keys that rows other than a target itself may see: the
history. Rows and keys begin at the same place, so position i is row i.
"""

from rooftile.exact.backends.hopper.device.config import LOG2E, WG_ROWS
from rooftile.exact.backends.hopper.device.scheduler import (
    MOST_SORTED,
    MaskBounds,
    WorkTile,
    dense_tile,
    packed_tile,
    tile_by_work,
)
from rooftile.exact.backends.hopper.flash_bwd.parts import BackwardConfig
from rooftile.runtime.hopper import ptx
from rooftile.runtime.hopper.gluon import aggregate, gl, gluon
from rooftile.runtime.hopper.pipeline import Ring, hide_from_ptxas

# rows, and keys, of a program's tile in every kernel: two warpgroups have 64 each
TILE_ROWS = gl.constexpr(128)


@aggregate
class UserTensors:
    """The tensors that say which rows are whose."""

    cu: gl.tensor
    targets: gl.tensor
    TARGETS: gl.constexpr  # whether there are any


@gluon.jit
def history_of(users: UserTensors, b, n):
    """How many rows of user b, who has n, are no targets."""
    end = n
    if users.TARGETS:
        end = n - gl.maximum(gl.minimum(gl.load(users.targets + b).to(gl.int32), n), 0)
    return end


@gluon.jit
def tile_of_rows(n, B, H, tiles, balanced_heads, users: UserTensors, mask: MaskBounds, KEYS: gl.constexpr):
    """Makes work tile number n of rows: `first_block` to `last_block` are the blocks of KEYS keys that some of them see.

    The last heads are taken together, the tiles with the most work first (see `device.scheduler`).
    """
    h, slot = dense_tile(n, tiles, H, balanced_heads)
    if (n >= (H - balanced_heads) * tiles) & (B <= MOST_SORTED):
        b, rank = tile_by_work(tiles - 1 - slot, users.cu, users.cu, B, TILE_ROWS, mask.SLOPED)
        last_tile = (gl.load(users.cu + b + 1).to(gl.int32) - gl.load(users.cu + b).to(gl.int32) - 1) // TILE_ROWS
        tile = gl.where(rank < 0, last_tile + 1, last_tile - rank)
    else:
        b, tile = packed_tile(tiles - 1 - slot, users.cu, B, TILE_ROWS)
    start = gl.load(users.cu + b).to(gl.int32)
    T = gl.load(users.cu + b + 1).to(gl.int32) - start
    S = history_of(users, b, T)
    t = tile * TILE_ROWS
    first = mask.first_key(t)
    stop = mask.last_key(gl.minimum(t + TILE_ROWS, T) - 1, S) + 1
    # a tile that sees nothing walks one block and finds nothing there
    first_block = gl.maximum(gl.minimum(first // KEYS, (stop - 1) // KEYS), 0)
    last_block = gl.maximum((stop - 1) // KEYS, first_block)
    none = n * 0
    return WorkTile((t < T).to(gl.int32), none, h, t, T, S, start, start, none, first_block, last_block)


@gluon.jit
def tile_of_keys(n, B, H, tiles, balanced_heads, users: UserTensors, mask: MaskBounds, ROWS: gl.constexpr):
    """Makes work tile number n of keys: `first_block` to `last_block` are the blocks of ROWS rows that see some of them."""
    h, slot = dense_tile(n, tiles, H, balanced_heads)
    slot = tiles - 1 - slot
    if (n >= (H - balanced_heads) * tiles) & (B <= MOST_SORTED):
        b, tile = tile_by_work(slot, users.cu, users.cu, B, TILE_ROWS, mask.SLOPED)
        tile = gl.where(tile < 0, tiles, tile)
    else:
        b, _ = packed_tile(slot, users.cu, B, TILE_ROWS)
        tile = slot - gl.load(users.cu + b).to(gl.int32) // TILE_ROWS - b
    start = gl.load(users.cu + b).to(gl.int32)
    T = gl.load(users.cu + b + 1).to(gl.int32) - start
    S = history_of(users, b, T)
    s = tile * TILE_ROWS
    first = gl.maximum(mask.first_position(s), 0)
    last = mask.last_position(gl.minimum(s + TILE_ROWS, S) - 1)
    # a position behind the history is every target's
    stop = gl.where(last >= S, T, last + 1)
    stop = gl.where(s < S, stop, 0)
    last_block = gl.maximum(stop - 1, 0) // ROWS
    first_block = gl.minimum(first // ROWS, last_block)
    none = n * 0
    return WorkTile((s < T).to(gl.int32), none, h, s, T, S, start, start, none, first_block, last_block)


@gluon.jit
def gates_of(x, to_exponent):
    """The logistic function of scores x, which are still to be multiplied by alpha: to_exponent is -log2(e) alpha."""
    return gl.inline_asm_elementwise(ptx.LOGISTIC_PAIR, "=f,=f,f,f", [x * to_exponent], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def exponent_factor(alpha):
    return alpha * -LOG2E


@gluon.jit
def factor_of(work: WorkTile, scale, by_rows):
    """Returns the factor of a user's sums: 1 over the number of its rows, or `scale`."""
    return gl.where(by_rows != 0, 1.0 / gl.maximum(work.T, 1).to(gl.float32), scale)


@gluon.jit
def slopes_of(weights, gates, alpha):
    """The derivative of silu at alpha S, from S gate and the gate; 0 where both are."""
    return gates + alpha * weights * (1.0 - gates)


@gluon.jit
def own_rows(rows: Ring, WG: gl.constexpr, config: BackwardConfig):
    """A warpgroup's 64 rows, whose place the assembler cannot tell: else it keeps the addresses of all columns in registers."""
    return rows.buffers.index(hide_from_ptxas(WG)).reshape([WG_ROWS, config.D])
