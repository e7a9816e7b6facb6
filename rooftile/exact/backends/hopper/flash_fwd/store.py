"""Stores the rows of a warpgroup: by the copy engine, or one by one where a packed sequence ends inside a tile."""

from rooftile.exact.backends.hopper.device.config import WG_ROWS, KernelConfig, query_offset
from rooftile.runtime.hopper.gluon import fence_async_shared, gl, gluon, tma_store
from rooftile.runtime.hopper.pipeline import wait_for_store


@gluon.jit
def store(output, o, o_desc, o_ptr, work, row, H, config: KernelConfig):
    """The rows of a warpgroup, to memory, at most 128 columns at a time; rows in fp32 by each thread that holds them."""
    if o.dtype == gl.float32:
        _store_held(o, o_ptr, work, row, H, config)
    elif config.DV > 128:
        low, high = o.reshape([WG_ROWS, 2, config.DV // 2]).permute((0, 2, 1)).split()
        _store_columns(output, low, 0, o_desc, o_ptr, work, row, H, config)
        wait_for_store()
        _store_columns(output, high, config.DV // 2, o_desc, o_ptr, work, row, H, config)
    else:
        _store_columns(output, o, 0, o_desc, o_ptr, work, row, H, config)


@gluon.jit
def _store_held(o, o_ptr, work, row, H, config: KernelConfig):
    """Four threads store a whole sector; in shared memory there would be no room for fp32."""
    rows = gl.arange(0, WG_ROWS, gl.SliceLayout(1, o.type.layout))
    t = row + query_offset(rows, config.ROWS)
    e = gl.arange(0, config.DV, gl.SliceLayout(0, o.type.layout))
    # all sequences of a pack are number 0, and their rows are counted from the first one's
    lines = ((work.b.to(gl.int64) * work.T + work.q_start + t) * H + config.query_head(rows, work)) * config.DIM_V
    in_bounds = gl.expand_dims(t < work.T, 1) & gl.expand_dims(e < config.DIM_V, 0)
    gl.store(o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), o, mask=in_bounds)


@gluon.jit
def _store_columns(output, o, column: gl.constexpr, o_desc, o_ptr, work, row, H, config: KernelConfig):
    """A packed sequence may end inside the tile, where the copy engine would not stop: its rows are stored one by one then."""
    columns: gl.constexpr = o.shape[1]
    staged = output.reshape([WG_ROWS, columns])
    staged.store(o)
    if config.PACKED:
        if row + config.ROWS <= work.T:
            _copy_out(output, o_desc, work, work.q_start + row, column, config)
        else:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
            rows = gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
            t = row + query_offset(rows, config.ROWS)
            e = column + gl.arange(0, columns, gl.SliceLayout(0, layout))
            lines = ((work.q_start + t).to(gl.int64) * H + config.query_head(rows, work)) * config.DIM_V
            has_next = gl.expand_dims(t < work.T, 1) & gl.expand_dims(e < config.DIM_V, 0)
            gl.store(o_ptr + gl.expand_dims(lines, 1) + gl.expand_dims(e, 0), staged.load(layout), mask=has_next)
    else:
        _copy_out(output, o_desc, work, row, column, config)


@gluon.jit
def _copy_out(output, o_desc, work, row, column: gl.constexpr, config: KernelConfig):
    fence_async_shared()
    tma_store(o_desc, [work.b, work.h * config.HEADS_PER_TILE, row, column], output)
