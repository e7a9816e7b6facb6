"""Computes the gradients once more, where another backend's kernels may have met a NaN: dq, dk and dv in one launch.

A weight of zero does not hide a NaN in the other factor of a matrix product. So a backend whose products lose what a mask should
hide notes in a word of memory that it met a NaN, and launches this after its own kernels. Triton's kernels set non-finite rows
aside wherever they must. One launch, as it follows every backward and all but always finds nothing to do.

A far row (see `device.row_stats`) is such a NaN too. The tiles of queries fill in its rest, which the tiles of keys read. So programs
draw tiles in their order, tiles of queries first, and one that has drawn a tile of keys waits until all tiles of queries are done:
whoever has one of these is running, and waits for none. Each kind of tile has a loop of its own: Triton 3.6 cannot compile some
head dims in one loop with both.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.device.listed import ListPointers
from rooftile.exact.backends.device.visibility import MaskNumbers
from rooftile.exact.backends.triton.call import TritonCall, call_of, constants_of, strides_of
from rooftile.exact.backends.triton.flash_bwd_kv import dkdv_tile
from rooftile.exact.backends.triton.flash_bwd_q import dq_tile
from rooftile.exact.backends.triton.scores import BackwardArguments, OptionNumbers, OptionTensors
from rooftile.exact.backends.triton.tiles import backward_kv_walks, backward_q_tile
from rooftile.exact.blocks.lists import steps_of_lists
from rooftile.exact.spec import Options, Spec
from rooftile.runtime.launch import Kernel

# enough programs to fill a chip if there is something to repair, few enough to start in no time
PROGRAMS = 256


@triton.jit
def _next_tile(nan_flag_ptr, stop):
    """The next tile that no program has; if there is none to compute, it is not read."""
    n = 0
    if stop > 0:
        n = tl.atomic_add(nan_flag_ptr + 1, 1)
    return n


@triton.jit
def _note_done(nan_flag_ptr):
    """Says that a tile of queries is done, after all threads have stored its rests."""
    tl.debug_barrier()
    tl.atomic_add(nan_flag_ptr + 2, 1)


@triton.jit
def _wait_for_queries(nan_flag_ptr, dq_tiles):
    done = tl.atomic_add(nan_flag_ptr + 2, 0)
    while done < dq_tiles:
        done = tl.atomic_add(nan_flag_ptr + 2, 0)
    tl.debug_barrier()


@triton.jit
def _repair_tiles(
    nan_flag_ptr, dq_ptr, dk_ptr, dv_ptr, dq_tiles, dkdv_tiles, problem, query_lists, key_lists, tiles_of_queries, tiles_of_keys, wave,
    SPEC: tl.constexpr, TILE: tl.constexpr, WALK: tl.constexpr, SECOND_WALK: tl.constexpr,
):  # fmt: skip
    """Computes tiles until none is left, if any is to be computed."""
    stop = tl.where(tl.load(nan_flag_ptr) != 0, dq_tiles + dkdv_tiles, 0)
    n = _next_tile(nan_flag_ptr, stop)
    while (n < dq_tiles) & (n < stop):
        dq_tile(n, dq_ptr, problem, query_lists, tiles_of_queries, wave, SPEC, TILE)
        _note_done(nan_flag_ptr)
        n = _next_tile(nan_flag_ptr, stop)
    if n < stop:
        _wait_for_queries(nan_flag_ptr, dq_tiles)
    while n < stop:
        dkdv_tile(n - dq_tiles, dk_ptr, dv_ptr, problem, key_lists, tiles_of_keys, wave // SPEC.GROUP, SPEC, WALK)
        if SECOND_WALK is not None:
            dkdv_tile(n - dq_tiles, dk_ptr, dv_ptr, problem, key_lists, tiles_of_keys, wave // SPEC.GROUP, SPEC, SECOND_WALK)
        n = _next_tile(nan_flag_ptr, stop)


# fmt: off
@triton.jit(do_not_specialize=[
    "dq_tiles", "dkdv_tiles", "B", "H", "T", "S", "tiles_of_queries", "tiles_of_keys", "wave", "left", "right", "prefix", "chunk",
])
def _repair(
    nan_flag_ptr,                                               # whether to; tiles that are drawn; tiles of queries that are done
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr, dq_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, bias_ptr,
    q_strides, k_strides, v_strides, bias_strides, do_strides,
    dq_tiles, dkdv_tiles,                                       # in all heads and sequences
    B, H, T, S, padded_T, tiles_of_queries, tiles_of_keys, wave,    # sizes; packed: T and S are totals
    scale, softcap, left, right, prefix, chunk,
    SPEC: tl.constexpr, TILE: tl.constexpr,
    WALK: tl.constexpr, SECOND_WALK: tl.constexpr,              # both gradients, or dk and then dv
):
    # fmt: on
    # q stands for ALiBi, seed and lists: no kernel reads them here
    problem = BackwardArguments(
        (q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr), (q_strides, k_strides, v_strides, do_strides), (B, H, T, S, padded_T),
        (cu_q_ptr, cu_k_ptr), OptionNumbers(scale, softcap, MaskNumbers(left, right, prefix, chunk), 0, 1.0),
        OptionTensors(bias_ptr, bias_strides, q_ptr, (0, 0), sinks_ptr, q_ptr),
    )  # fmt: skip
    query_lists = ListPointers(q_ptr, q_ptr, q_ptr, (0, 0, 1, 0, 0))
    key_lists = ListPointers(q_ptr, q_ptr, q_ptr, (0, 0, 1, 0, 0, 0, 0, 0))
    _repair_tiles(
        nan_flag_ptr, dq_ptr, dk_ptr, dv_ptr, dq_tiles, dkdv_tiles, problem, query_lists, key_lists, tiles_of_queries, tiles_of_keys, wave,
        SPEC, TILE, WALK, SECOND_WALK,
    )  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=[
    "dq_tiles", "dkdv_tiles", "B", "H", "T", "S", "tiles_of_keys", "wave", "left", "right", "prefix", "chunk",
])
def _repair_listed(
    nan_flag_ptr,
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr, dq_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr,
    counts_ptr, indices_ptr, key_counts_ptr, entries_ptr, bits_ptr,
    q_strides, k_strides, v_strides, do_strides,
    dq_tiles, dkdv_tiles,
    B, H, T, S, padded_T, tiles_of_keys, wave,
    scale, softcap, left, right, prefix, chunk, lists,
    SPEC: tl.constexpr, TILE: tl.constexpr,
    WALK: tl.constexpr, SECOND_WALK: tl.constexpr,
):
    # fmt: on
    """The same over lists of blocks; there is no bias."""
    problem = BackwardArguments(
        (q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr), (q_strides, k_strides, v_strides, do_strides), (B, H, T, S, padded_T),
        (cu_q_ptr, cu_k_ptr), OptionNumbers(scale, softcap, MaskNumbers(left, right, prefix, chunk), 0, 1.0),
        OptionTensors(q_ptr, (0, 0, 0, 0), q_ptr, (0, 0), sinks_ptr, q_ptr),
    )  # fmt: skip
    query_lists = ListPointers(counts_ptr, indices_ptr, bits_ptr, (lists[0], lists[1], lists[2], lists[3], lists[4]))
    key_lists = ListPointers(key_counts_ptr, entries_ptr, bits_ptr, lists)
    _repair_tiles(
        nan_flag_ptr, dq_ptr, dk_ptr, dv_ptr, dq_tiles, dkdv_tiles, problem, query_lists, key_lists, dq_tiles // (B * H), tiles_of_keys, wave,
        SPEC, TILE, WALK, SECOND_WALK,
    )  # fmt: skip


_kernel_listed = Kernel(_repair_listed)
_kernel = Kernel(_repair)


def plan(q: Tensor, k: Tensor, v: Tensor, do: Tensor, options: Options, spec: Spec) -> Callable[..., None]:
    """The launch that computes dq, dk and dv once more.

    q, k, v, do and the options equal the arguments of all calls in shapes, strides, dtypes and device, and the last axis of each is
    contiguous. There are masks, groups, softcap, bias, sinks and packed sequences, and no other option. What is returned holds none of
    the tensors. It takes

        nan_flag   int32 (3,): the kernel reads the first when it runs, and leaves dq, dk and dv alone if it is zero; the others are
                   zeros, and count tiles
        q, k, v, do
        words      int64, dense (B, H, padded T) or packed (H, total_q): lse and delta of each row, as `device.row_stats` has them
        rests      the same, lse and zeros; it fills in what the lse of far rows has lost
        dq, dk, dv contiguous, in the shapes of q, k and v: overwritten if the flag is set
        cu_q, cu_k int32 offsets of packed sequences; else any tensors
        sinks      fp32 (H,), if there are any; else any tensor
        bias       in the strides of the options'; else any tensor. Over lists of blocks counts and indices of the lists of queries,
                   counts and entries of the lists of keys, and bits or None stand here, as a tuple
    """
    call = call_of(q, k, v, options, spec)
    tile, walk = backward_q_tile(spec), backward_kv_walks(spec)[0]
    dq_tiles, tiles_of_queries = call.programs(call.T, tile.BLOCK_T, call.H)
    dkdv_tiles, tiles_of_keys = call.programs(call.S, walk.tile.BLOCK_S, call.Hk)
    if spec.block_size is not None:
        return _plan_listed(call, strides_of(do), dq_tiles, dkdv_tiles, tiles_of_keys)
    numbers = (
        *call.strides[:4], strides_of(do), dq_tiles, dkdv_tiles, call.B, call.H, call.T, call.S, call.padded_T, tiles_of_queries,
        tiles_of_keys, call.wave, *call.numbers[:6],
    )  # fmt: skip
    return _kernel.bound((min(dq_tiles + dkdv_tiles, PROGRAMS), 1, 1), numbers, constants(spec))


def _plan_listed(
    call: TritonCall, do_strides: tuple[int, ...], dq_tiles: int, dkdv_tiles: int, tiles_of_keys: int
) -> Callable[..., None]:  # fmt: skip
    """The launch over lists of blocks, whose own sizes may change from call to call."""
    grid, own = (min(dq_tiles + dkdv_tiles, PROGRAMS), 1, 1), constants(call.spec)
    numbers = (
        *call.strides[:3], do_strides, dq_tiles, dkdv_tiles, call.B, call.H, call.T, call.S, call.padded_T, tiles_of_keys, call.wave,
        *call.numbers[:6],
    )  # fmt: skip
    launch = cache(lambda lists: _kernel_listed.bound(grid, (*numbers, lists), own))
    Hk, group = call.Hk, call.spec.group

    def run(*tensors: Any) -> None:
        *others, lists = tensors
        counts, indices, key_counts, entries, bits = lists
        own_steps = *steps_of_lists(counts, Hk, group), indices.shape[-1], 0 if bits is None else bits.shape[3]
        bits = counts if bits is None else bits
        launch((*own_steps, *steps_of_lists(key_counts, Hk, group)[:2], entries.shape[-2]))(*others, *lists[:4], bits)

    return run


@cache
def constants(spec: Spec) -> dict[str, Any]:
    """Compile-time arguments."""
    walk, second = (*backward_kv_walks(spec), None)[:2]
    known = {"SPEC": constants_of(spec).spec, "TILE": backward_q_tile(spec), "WALK": walk, "SECOND_WALK": second}
    return known | {"num_warps": walk.tile.num_warps}
