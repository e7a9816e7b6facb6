"""Chooses tiles and the number of programs, and launches the kernels of this folder.

Below some 64 rows a product is bound by the bytes of the weight: there what matters is how many of them are in flight, so tiles
are small and rings leave room for the next kernel. Above, it is bound by what the L2 cache delivers, so tiles grow where there
are enough of them. The choice between two tiles, and the number of programs, follow from the steps that a program takes and from
what a shared tile costs; the constants were fitted to measurements of `rooftile bench tiles` on an H100.

Under `deterministic` the tile's rows of the weight and the programs are as for one row of x, so that the split of K follows
from N and K.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rooftile.runtime.early_weights import may_read_early
from rooftile.runtime.hopper.gluon import TensorDescriptor, gl
from rooftile.runtime.launch import Kernel
from rooftile.weights.definition import Product, has_many_rows
from rooftile.weights.formats import weight_format
from rooftile.weights.hopper import counters
from rooftile.weights.hopper.codes import product_of_codes
from rooftile.weights.hopper.gated_codes import product_of_gates
from rooftile.weights.hopper.many_rows import BLOCK_M, BLOCK_N, COLUMNS, product_of_many_rows
from rooftile.weights.hopper.ordered import in_order
from rooftile.weights.hopper.schedule import ROWS, STEP, WARPGROUPS, ProductTile
from rooftile.weights.hopper.widened import product_of_widened
from rooftile.weights.weight import Parts

# rows of x of a launch, at most, and under `deterministic`, where parts of all of them are kept for each program
MOST_ROWS, MOST_ROWS_IN_ORDER = 2048, 512
# rows of the weight, at least
LEAST_N = 16
# bytes of a program's shared memory for its ring: 227 KiB, less what results in fp32 take on their way out, and barriers
SHARED = 196 * 1024
MOST_STAGES = 12
# rows of x up to which a product is bound by bytes
BYTES = 64
# ... and up to which a warpgroup whose weights become 16-bit numbers orders them for itself; fewer where a program has enough
# steps that a kernel which orders them once is faster
ORDERS, ORDERS_IN_MANY_STEPS, MANY_STEPS = 32, 16, 16
# steps that a program loses by sharing tiles: where each tile has as many programs, and where not. Parts of up to
# ORDERS rows of x are small. Steps of codes take half as long as steps of 16-bit numbers.
SHARING_FEW, SHARING, SHARING_CODES = (3, 12), (9, 16), (16, 28)
# time of a step of a tile twice as large, in steps: it reads less from the L2 cache
TWICE = 1.86
# upper bound on the steps of all tiles, so that steps * programs fits in int32
MOST_STEPS = 1 << 23
# steps over K per program, at least
LEAST_STEPS = 2

# barriers are made beside the end of the kernel before
LAUNCH = {"num_warps": 4, "launch_pdl": True}

_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.uint8: gl.uint8,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int32: gl.int32,
}


@cache
def tile_of(M: int, N: int, K: int, format: str, deterministic: bool, processors: int = 132) -> ProductTile:
    """Returns the tile of a product of M rows of x with a weight (N, K)."""
    is_codes = weight_format(format).activations is not None
    columns = min(max(triton.next_power_of_2(M), 8), 128)
    if is_codes:
        # with factors in the loop there are no registers for a second sum of these columns
        tile, larger = ProductTile(1, columns, 1, 0), ProductTile(1, columns, 2, 0)
        twice = M > 128 and format != "fp8_tile"
    elif M <= 128 or deterministic:
        tile, larger, twice = ProductTile(1, columns, 1, 0), ProductTile(2, columns, 1, 0), True
    else:
        tile, larger, twice = ProductTile(1, 128, 1, 0), ProductTile(1, 256, 1, 0), True
    rows = 1 if deterministic else M
    costs = [
        each * _programs_of(sizes_of(one, rows, N, K, deterministic), processors, sharing_of(rows, is_codes))[1]
        for each, one in ((1.0, tile), (TWICE, larger))
    ]  # fmt: skip
    # how many rows of x a tile has does not change the order of sums
    if twice and (costs[1] <= costs[0] or (is_codes and deterministic)):
        tile = larger
    return tile._replace(STAGES=_stages(tile, M, format, orders_itself(M, N, K, processors)))


def orders_itself(M: int, N: int, K: int, processors: int, in_many_steps: int = ORDERS_IN_MANY_STEPS) -> bool:
    """Whether a warpgroup orders M rows of x for itself: else a kernel does it before the product.

    Each warpgroup does it again in each step, so the kernel pays where a program has many steps;
    `rooftile bench tiles` times both.

    Args:
        N, K: of the weight, all of its rows.
        in_many_steps: the rows up to which it does so in however many steps.
    """
    steps = triton.cdiv(N, WARPGROUPS * ROWS.value) * triton.cdiv(K, STEP.value)
    most = in_many_steps if steps >= MANY_STEPS * processors else ORDERS
    return most >= M


def sharing_of(rows: int, is_codes: bool) -> tuple[int, int]:
    """Returns the steps that it costs to share tiles of `rows` rows of x: evenly, and unevenly."""
    if is_codes:
        return SHARING_CODES
    return SHARING_FEW if rows <= ORDERS else SHARING


def _stages(tile: ProductTile, M: int, format: str, orders: bool) -> int:
    """How many steps of a tile are in flight; `orders`: a warpgroup orders rows of x for itself."""
    kind = weight_format(format)
    x_bytes = tile.block_m * STEP.value * (1 if kind.activations else 2)
    held = WARPGROUPS * x_bytes if kind.activations is None and orders else 0
    most = min((SHARED - held) // (tile.block_n * STEP.value * kind.bits // 8 + x_bytes), MOST_STAGES)
    # half of the memory leaves room for a program of the next kernel, whose copies begin while this one ends
    few = BYTES if kind.activations is None else 32
    return most if few < M else most // 2


class ProductSizes(NamedTuple):
    """The sizes that a kernel is told at run time."""

    M: int
    N: int
    tiles: int  # all tiles in the line
    steps: int  # over K
    spread: int  # ... for each tile of N: one for each tile of the rows of x, or 1, and a program walks through these


def sizes_of(tile: ProductTile, M: int, N: int, K: int, deterministic: bool, block_n: int | None = None) -> ProductSizes:
    """Returns the sizes of a product; a tile has `block_n` of its N results, or those that its rows of the weight give."""
    tiles, steps, rows = _divided(N, block_n or tile.block_n), _divided(K, STEP.value), _divided(M, tile.block_m)
    spread = 1 if deterministic or tiles * steps * rows > MOST_STEPS else rows
    return ProductSizes(M, N, tiles * spread, steps, spread)


def _divided(total: int, part: int) -> int:
    """Rounds a quotient up, as triton.cdiv does, whose call takes microseconds on the host."""
    return -(-total // part)


def programs_of(sizes: ProductSizes, processors: int, rows: int, *, is_codes: bool = False) -> int:
    """Returns how many programs share a product of `rows` rows of x, at most one for each multiprocessor.

    Under `deterministic` they are chosen as for one row.
    """
    return _programs_of(sizes, processors, sharing_of(rows, is_codes))[0]


@cache
def _programs_of(sizes: ProductSizes, processors: int, sharing: tuple[int, int]) -> tuple[int, float]:
    """The number of programs, and what they take, in steps."""
    all_steps = sizes.tiles * sizes.steps
    found = 1, float(all_steps)
    for count in range(2, max(min(processors, all_steps // LEAST_STEPS), 1) + 1):
        cost = _divided(all_steps, count)
        if sizes.tiles % count:
            cost += sharing[0] if count % sizes.tiles == 0 else sharing[1]
        if cost <= found[1]:
            found = count, float(cost)
    return found


@cache
def processors_of(device: torch.device) -> int:
    """Returns the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def refusals(asked: Any) -> Iterator[str]:
    """Yields why the kernels of this folder do not take a call; the device is known to be Hopper."""
    product, parts = asked.product, asked.parts
    kind = weight_format(product.format)
    # a row's bits may not depend on how many rows there are: then this many are multiplied at a time
    if asked.x.shape[0] > MOST_ROWS and not product.deterministic and not has_many_rows(asked.x.shape[0], product):
        more = "in INT8 more if N is a multiple of 16 and results have 16 bits"
        yield f"{asked.x.shape[0]:,} rows; has up to {MOST_ROWS:,}, {more}"
    if product.N < LEAST_N:
        yield f"N is {product.N}; has {LEAST_N} and more"
    unit = 32 if kind.is_packed else 16
    if product.K % unit:
        yield f"K is {product.K}; has multiples of {unit}"
    if parts.codes.data_ptr() % 16:
        yield "codes at an address that is no multiple of 16; has aligned ones"
    if kind.activations is None:
        yield from _widened_refusals(asked)


def _widened_refusals(asked: Any) -> Iterator[str]:
    """Yields why weights do not become numbers of x's dtype in registers."""
    format, group, dtype, scales = asked.product.format, asked.product.group, asked.x.dtype, asked.parts.scales.dtype
    if format in ("w8", "int4"):
        if dtype not in (torch.bfloat16, torch.float16) or scales != dtype:
            yield f"x in {dtype} and scales in {scales}; has both in bfloat16, or both in float16"
    elif dtype != torch.bfloat16 and (format != "nvfp4" or dtype != torch.float16):
        # most powers of two are no numbers of fp16
        yield f"x in {dtype}; {format} has bfloat16{' and float16' if format == 'nvfp4' else ''}"
    # a thread's 32 neighbours share a scale
    if format in ("w8", "int4") and group != asked.product.K and (group % 32 or (128 % group and group % 128)):
        yield f"groups of {group} numbers; has 32, 64, multiples of 128 and whole rows"


def multiply(x: Tensor, x_scales: Tensor | None, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
    """Multiplies x (M, K), or its codes with their scales, with a weight, to (M, N)."""
    o = torch.empty((x.shape[0], product.N), dtype=product.out_dtype, device=x.device)
    if parts.order is not None:
        x = x.index_select(1, parts.order)
    parts = parts._replace(codes=parts.codes.contiguous(), scales=parts.scales.contiguous())
    bias = None if bias is None else bias.contiguous()
    if x_scales is not None and has_many_rows(x.shape[0], product):
        _by_many_rows(_aligned(x), x_scales.contiguous(), parts, bias, product, o)
        return o
    most = MOST_ROWS_IN_ORDER if product.deterministic else MOST_ROWS
    for start in range(0, x.shape[0], most):
        rows = slice(start, start + most)
        if x_scales is None:
            _by_widened(x[rows], parts, bias, product, o[rows])
        else:
            _by_codes(_aligned(x[rows]), x_scales[rows].contiguous(), parts, bias, product, o[rows])
    return o


def _aligned(x: Tensor) -> Tensor:
    """Returns contiguous rows from which the copy engine can read: at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _by_many_rows(
    x: Tensor, x_scales: Tensor, parts: Parts, bias: Tensor | None, product: Product, o: Tensor
) -> None:  # fmt: skip
    M, (N, K) = x.shape[0], parts.codes.shape
    rows, columns = triton.cdiv(M, BLOCK_M.value), triton.cdiv(N, BLOCK_N.value)
    programs = min(rows * columns, processors_of(x.device))
    kernel, constants = _kernel_of_many_rows(bias is not None)
    tensors = (parts.codes, x, o, x_scales, parts.scales, parts.scales if bias is None else bias)
    kernel((programs, 1, 1), (*tensors, M, N, rows, columns, triton.cdiv(K, STEP.value)), constants)


def _by_codes(
    x: Tensor, x_scales: Tensor, parts: Parts, bias: Tensor | None, product: Product, o: Tensor
) -> None:  # fmt: skip
    tile = _tile(x, product)
    start_codes(tile, _programs(tile, x, product), x, x_scales, parts, bias, product, o)


def start_codes(
    tile: ProductTile, programs: int, x: Tensor, x_scales: Tensor, parts: Parts, bias: Tensor | None, product: Product, o: Tensor
) -> None:  # fmt: skip
    """Launches a product of codes with a tile; all tensors are contiguous."""
    sizes = _sizes(tile, x.shape[0], product)
    sums = torch.int32 if product.format == "int8" else torch.float32
    shared = shared_sums(tile, programs, sizes, sums, x.device)
    kernel, constants = _kernel_of_codes(product.format, bias is not None, tile)
    added = parts.scales if bias is None else bias
    tensors = (parts.codes, x, x_scales, parts.scales, added, o, *shared)
    kernel((programs, 1, 1), (*tensors, *sizes, int(may_read_early())), constants)


def gated_tile_of(M: int, N: int, K: int, format: str, processors: int = 132) -> ProductTile:
    """Returns the tile of a product whose halves of N are multiplied with each other: a warpgroup has rows of both."""
    tile = ProductTile(2, min(max(triton.next_power_of_2(M), 8), 128), 1, 0)
    return tile._replace(STAGES=_stages(tile, M, format, orders_itself(M, N, K, processors)))


def multiply_gated(x: Tensor, parts: Parts, bias: Tensor | None, kind: str, product: Product) -> Tensor:
    """The activation of the first half of a product (M, N) times its second half: (M, N / 2). x has few rows."""
    o = torch.empty((x.shape[0], product.N // 2), dtype=product.out_dtype, device=x.device)
    parts = parts._replace(codes=parts.codes.contiguous(), scales=parts.scales.contiguous())
    if parts.order is not None:
        x = x.index_select(1, parts.order)
    x, ordered = _copied(x, product)
    tile = gated_tile_of(x.shape[0], product.N, product.K, product.format, processors_of(x.device))
    half = product._replace(N=product.N // 2)
    sizes = _sizes_of_halves(tile, x.shape[0], half)
    programs = programs_of(sizes, processors_of(x.device), x.shape[0])
    _start_widened(tile, programs, sizes, x, ordered, parts, bias, half, o, kind)
    return o


def multiply_gated_codes(
    x: Tensor, x_scales: Tensor, parts: Parts, bias: Tensor | None, scale: Tensor, kind: str, product: Product
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`multiply_gated` of FP8 codes, whose result leaves in FP8 with one scale: codes (M, N / 2) and scales (M, 1)."""
    M, half = x.shape[0], product._replace(N=product.N // 2)
    o = torch.empty((M, half.N), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    tile = gated_tile_of(M, product.N, product.K, product.format, processors_of(x.device))
    sizes = _sizes_of_halves(tile, M, half)
    programs = programs_of(sizes, processors_of(x.device), M, is_codes=True)
    shared = shared_sums(tile, programs, sizes, torch.float32, x.device)
    kernel, constants = _kernel_of_gates(product.out_dtype, kind, bias is not None, tile)
    w_scales = parts.scales.contiguous()
    added = w_scales if bias is None else bias.contiguous()
    tensors = (parts.codes.contiguous(), _aligned(x), x_scales.contiguous(), w_scales, added, scale, scales, o)
    kernel((programs, 1, 1), (*tensors, *shared, *sizes, int(may_read_early())), constants)
    return o, scales


def _sizes_of_halves(tile: ProductTile, M: int, half: Product) -> ProductSizes:
    """`_sizes` where a tile has as many rows of each half of the weight."""
    return sizes_of(tile, M, half.N, half.K, half.deterministic, tile.block_n // 2)


def _by_widened(x: Tensor, parts: Parts, bias: Tensor | None, product: Product, o: Tensor) -> None:
    x, ordered = _copied(x, product)
    tile = _tile(x, product)
    start_widened(tile, _programs(tile, x, product), x, ordered, parts, bias, product, o)


def _copied(x: Tensor, product: Product) -> tuple[Tensor, bool]:
    """Returns rows that the copy engine can read, and whether they are in order."""
    ordered = not orders_itself(x.shape[0], product.N, product.K, processors_of(x.device))
    if ordered:
        x = in_order(x, "bytes" if weight_format(product.format).bits == 8 else "nibbles")
    elif x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        # the copy engine steps over multiples of 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
    return x, ordered


def start_widened(
    tile: ProductTile, programs: int, x: Tensor, ordered: bool, parts: Parts, bias: Tensor | None, product: Product, o: Tensor
) -> None:  # fmt: skip
    """Launches a product whose weights become 16-bit numbers with a tile; `ordered`: x comes from `in_order`."""
    _start_widened(tile, programs, _sizes(tile, x.shape[0], product), x, ordered, parts, bias, product, o, "")


def _start_widened(
    tile: ProductTile, programs: int, sizes: ProductSizes, x: Tensor, ordered: bool, parts: Parts, bias: Tensor | None,
    product: Product, o: Tensor, gate: str,
) -> None:  # fmt: skip
    shared = shared_sums(tile, programs, sizes, torch.float32, x.device)
    group = 0 if product.group == product.K else product.group
    kernel, constants = _kernel_of_widened(
        product.format, group, parts.zeros is not None, ordered, gate, bias is not None, tile
    )  # fmt: skip
    codes, scales = (x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.int8) else x for x in parts[:2])
    # a pointer that is not read points anywhere
    zeros, outer_scales, added = (codes if x is None else x.contiguous() for x in (parts.zeros, parts.outer, bias))
    # one outer scale of all rows, or one per row
    counts = (product.K // product.group, int(parts.outer is not None and parts.outer.shape[0] > 1))
    tensors = (codes, x, scales, zeros, outer_scales, added, o, *shared)
    kernel((programs, 1, 1), (*tensors, *sizes, int(may_read_early()), *counts), constants)


def _sizes(tile: ProductTile, M: int, product: Product) -> ProductSizes:
    return sizes_of(tile, M, product.N, product.K, product.deterministic)


def _tile(x: Tensor, product: Product) -> ProductTile:
    N, K, format = product.N, product.K, product.format
    return tile_of(x.shape[0], N, K, format, product.deterministic, processors_of(x.device))


def _programs(tile: ProductTile, x: Tensor, product: Product) -> int:
    # under `deterministic` as if there were one row
    rows = 1 if product.deterministic else x.shape[0]
    return programs_of(_sizes(tile, rows, product), processors_of(x.device), rows, is_codes=product.activations is not None)


def shared_sums(
    tile: ProductTile, programs: int, sizes: ProductSizes, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns memory for the partials of tiles that programs share, and their counters, which are zero."""
    if sizes.tiles % programs == 0:
        none = counters.zeros(1, device)
        return none.view(dtype), none
    # tiles of rows that a program walks through
    rows = triton.cdiv(sizes.M, tile.block_m) // sizes.spread
    size = rows * programs * 2 * tile.block_n * tile.block_m
    return torch.empty(size, dtype=dtype, device=device), counters.zeros(rows * sizes.tiles * tile.blocks, device)


@cache
def _kernel_of_codes(format: str, bias: bool, tile: ProductTile) -> tuple[Kernel, dict[str, Any]]:
    kernel = Kernel(product_of_codes, (described(tile.block_n), described(tile.block_m)))
    return kernel, {"FORMAT": format, "BIAS": bias, "T": tile} | LAUNCH


@cache
def _kernel_of_many_rows(bias: bool) -> tuple[Kernel, dict[str, Any]]:
    boxes = (described(BLOCK_N.value), described(BLOCK_M.value), described(ROWS.value, COLUMNS.value))
    return Kernel(product_of_many_rows, boxes), {"BIAS": bias} | LAUNCH


@cache
def _kernel_of_gates(dtype: torch.dtype, gate: str, bias: bool, tile: ProductTile) -> tuple[Kernel, dict[str, Any]]:
    kernel = Kernel(product_of_gates, (described(tile.block_n // 2), described(tile.block_m)))
    return kernel, {"DTYPE": _DTYPES[dtype], "GATE": gate, "BIAS": bias, "T": tile} | LAUNCH


@cache
def _kernel_of_widened(
    format: str, group: int, zeros: bool, ordered: bool, gate: str, bias: bool, tile: ProductTile
) -> tuple[Kernel, dict[str, Any]]:
    bits = weight_format(format).bits
    rows = tile.block_n // 2 if gate else tile.block_n
    kernel = Kernel(product_of_widened, (described(rows, STEP.value * bits // 8), described(tile.block_m)))
    options = {"FORMAT": format, "GROUP": group, "ZEROS": zeros, "ORDERED": ordered, "GATE": gate, "BIAS": bias, "T": tile}
    return kernel, options | LAUNCH


def described(rows: int, columns: int = STEP.value) -> Any:
    """Returns what makes a matrix's descriptor for the copy engine: it copies `rows` by `columns`, with zeros past the ends."""
    return partial(_described, box=(rows, columns))


def _described(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, list(box), layout_of(box, x.dtype))


@cache
def layout_of(box: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Returns the layout of a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
