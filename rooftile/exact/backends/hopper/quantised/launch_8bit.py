"""Starts attention in 8 bits: the kernels that quantise, and the one that attends."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.hopper.counters import counter
from rooftile.exact.backends.hopper.plan import numbers_of, processors, rows_shape, schedule, sizes_of
from rooftile.exact.backends.hopper.quantised import kernel, quantise
from rooftile.exact.backends.hopper.tiles import WARPGROUP
from rooftile.exact.backends.hopper.tma import descriptor, readable
from rooftile.exact.spec import Options, Spec
from rooftile.numerics.hadamard import norms, signs_of
from rooftile.numerics.precision import Precision
from rooftile.numerics.recipe import QuantisedQKV
from rooftile.numerics.scaling import BLOCK
from rooftile.runtime.launch import Kernel

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class Tile8(NamedTuple):
    """The tile and registers of `flash_fwd_8bit`, for 128 queries."""

    KEYS: int  # keys per block
    Q_STAGES: int
    KV_STAGES: int
    COMPUTE_REGISTERS: int
    COPY_REGISTERS: int


TILE = Tile8(KEYS=128, Q_STAGES=2, KV_STAGES=4, COMPUTE_REGISTERS=240, COPY_REGISTERS=24)
# limited by registers and shared memory
WIDE = TILE._replace(KEYS=64, Q_STAGES=1)


def tile_of(spec: Spec) -> Tile8:
    return WIDE if spec.dim_v > 128 else TILE


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse of tensors that are quantised first."""
    return attend(quantise_qkv(q, k, v, options, spec), spec)


def quantise_qkv(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> QuantisedQKV:
    """The integers of `rooftile.numerics.recipe`; values in columns."""
    precision = _recipe(spec)
    sizes = sizes_of(q, k, options)
    packed = spec.layout == "packed"
    queries = _Blocks(sizes.B, sizes.T, q.shape[-2], options.cu_q)
    keys = _Blocks(sizes.B, sizes.S, k.shape[-2], options.cu_k)
    q_codes, k_codes = (torch.empty(x.shape, dtype=_CODES[precision.qk], device=x.device) for x in (q, k))
    # packed: one line of all parts
    columns = (1, sizes.Hk, spec.dim_v, keys.slots * BLOCK) if packed else (sizes.B, sizes.Hk, spec.dim_v, keys.each * BLOCK)
    v_codes = torch.empty(columns, dtype=torch.float8_e4m3fn, device=v.device)
    # a packed slot may stay empty
    made_of = torch.ones if packed else torch.empty
    q_scales, k_scales, v_scales = (made_of(x.slots, x.heads, 1, device=q.device) for x in (queries, keys, keys))
    shift = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if precision.smooth_k else None
    signs = _signs(spec.dim, q.device) if precision.incoherent else None
    made = QuantisedQKV(
        q=q_codes, k=k_codes, v=v_codes, q_scales=q_scales, k_scales=k_scales, v_scales=v_scales, shift=shift,
        signs=None if signs is None else signs_of(spec.dim, device=q.device), precision=precision, dtype=spec.dtype,
        cu_q=options.cu_q, cu_k=options.cu_k, v_order="columns",
    )  # fmt: skip
    mean = _mean(readable(k), keys, spec) if precision.smooth_k and sizes.S else None
    if q.numel() and mean is None and shift is not None:
        shift.zero_()
    if q.numel() or k.numel():
        _quantise((readable(q), readable(k), readable(v)), made, mean, signs, queries, keys)
    return made


class _Blocks(NamedTuple):
    """A tensor as blocks of 128 positions."""

    B: int
    length: int  # packed: the total
    heads: int
    cu: Tensor | None

    @property
    def each(self) -> int:
        """Blocks of a dense sequence."""
        return -(-self.length // BLOCK)

    @property
    def slots(self) -> int:
        """The blocks of all sequences; packed, some stay empty."""
        return self.B * self.each if self.cu is None else self.length // BLOCK + self.B

    def programs(self, dim: int, device: torch.device) -> int:
        """Returns the number of programs that run at once."""
        return min(self.slots * self.heads, processors(device) * 256 // dim)


def _recipe(spec: Spec) -> Precision:
    assert spec.precision is not None
    return spec.precision


@cache
def _signs(dim: int, device: torch.device) -> Tensor:
    return signs_of(dim, device=device) * norms(dim, device)


def _mean(k: Tensor, keys: _Blocks, spec: Spec) -> Tensor:
    """The mean key (B, Hk, D), fp32."""
    mean = torch.empty(keys.B, keys.heads, spec.dim, dtype=torch.float32, device=k.device)
    programs = keys.B * keys.heads * spec.dim // quantise.COLUMNS.value
    cu = mean if keys.cu is None else keys.cu
    constants = _constants_of_mean(spec.dim, keys.cu is not None)
    _mean_kernel(spec.dim)((programs, 1, 1), (k, k, mean, cu), constants)
    return mean


def _quantise(
    tensors: tuple[Tensor, Tensor, Tensor], made: QuantisedQKV, mean: Tensor | None, signs: Tensor | None,
    queries: _Blocks, keys: _Blocks,
) -> None:  # fmt: skip
    q, k, v = tensors
    D, DV = q.shape[-1], v.shape[-1]
    described = (q, k, v, made.q, made.k, made.v.transpose(1, 2))
    # an empty tensor has no TMA descriptor: pass a tensor of one block instead, which no kernel reads
    described = tuple([x if x.numel() else x.new_empty([n or BLOCK for n in x.shape]) for x in described])
    scales = (made.q_scales, made.k_scales, made.v_scales)
    others = (made.shift, mean, signs, queries.cu, keys.cu)
    tensors = (made.q, made.k, *scales, *(made.q_scales if x is None else x for x in others))
    numbers = (keys.B, queries.heads, keys.heads, queries.length, keys.length, queries.each, keys.each, queries.slots, keys.slots)
    constants = _constants_of_quantise(
        queries.heads // keys.heads, D, DV, keys.cu is not None, made.q.dtype == torch.int8, signs is not None, mean is not None
    )
    grid = (max(queries.programs(D, q.device), keys.programs(D, q.device)), 1, 1)
    _quantise_kernel(D, DV)(grid, (*described, *tensors, *numbers), constants)


def attend(qkv: QuantisedQKV, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse of what `quantise_qkv` made."""
    assert qkv.v_order == "columns"
    q, k, columns = qkv.q, qkv.k, qkv.v
    sizes = sizes_of(q, k, Options(cu_q=qkv.cu_q, cu_k=qkv.cu_k))
    o = torch.empty((*q.shape[:-1], spec.dim_v), dtype=qkv.dtype, device=q.device)
    lse = torch.empty(rows_shape(sizes, spec), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    if sizes.S == 0:
        return o.zero_(), lse.fill_(-torch.inf)
    tiles, programs, tail = schedule(sizes.T, sizes.H, 2 * WARPGROUP, sizes, q.device, spec)
    scale, _, *mask = numbers_of(spec)
    cu_q, cu_k, shift = (lse if x is None else x for x in (qkv.cu_q, qkv.cu_k, qkv.shift))
    described = (q, k, columns.transpose(1, 2), o)
    tensors = (q, k, columns, o, lse, qkv.q_scales, qkv.k_scales, qkv.v_scales, shift, cu_q, cu_k, counter(q.device))
    arguments = (*described, *tensors, sizes.B, sizes.S, tiles, tail, scale, *mask)
    _kernel(spec)((programs, 1, 1), arguments, constants(spec))
    return o, lse


@cache
def _kernel(spec: Spec) -> Kernel:
    return Kernel(kernel.flash_fwd_8bit, tuple(partial(descriptor, box=box) for box in boxes(spec)))


def boxes(spec: Spec) -> tuple[tuple[int, int, int], ...]:
    """Returns the TMA boxes of q, k, v (in columns) and o."""
    D, DV = spec.dim, spec.dim_v
    KEYS = tile_of(spec).KEYS
    return (1, WARPGROUP, D), (1, KEYS, D), (1, DV, KEYS), (1, WARPGROUP, DV)


@cache
def constants(spec: Spec) -> dict[str, int]:
    """The compile-time arguments of `flash_fwd_8bit`."""
    mask = spec.mask
    return tile_of(spec)._asdict() | {
        "GROUP": spec.group, "D": spec.dim, "DV": spec.dim_v, "PACKED": spec.layout == "packed",
        "LEFT": mask.left is not None, "RIGHT": mask.right is not None, "PREFIX": mask.prefix is not None,
        "CHUNK": bool(mask.chunks), "SMOOTHED": _recipe(spec).smooth_k, "num_warps": 4,
    }  # fmt: skip


@cache
def _mean_kernel(dim: int) -> Kernel:
    return Kernel(quantise.mean_keys, (partial(descriptor, box=(1, BLOCK, dim)),))


@cache
def _constants_of_mean(dim: int, packed: bool) -> dict[str, int]:
    return {"D": dim, "PACKED": packed, "num_warps": 8}


@cache
def _quantise_kernel(dim: int, dim_v: int) -> Kernel:
    rows = partial(descriptor, box=(1, BLOCK, dim))
    columns = partial(descriptor, box=(1, dim_v, BLOCK))
    return Kernel(quantise.quantise, (rows, rows, rows, rows, rows, columns))


@cache
def _constants_of_quantise(
    group: int, dim: int, dim_v: int, packed: bool, integer: bool, rotate: bool, smooth: bool
) -> dict[str, int]:
    return {
        "GROUP": group, "D": dim, "DV": dim_v, "PACKED": packed, "INTEGER": integer, "ROTATE": rotate, "SMOOTH": smooth,
        # a product and a sum in one instruction would be rounded once, and the recipe's are rounded twice
        "enable_fp_fusion": False,
        # begins with values while `mean_keys` runs
        "launch_pdl": smooth,
        # two programs per multiprocessor
        "num_warps": 4 * dim // 64, "maxnreg": 128,
    }  # fmt: skip
