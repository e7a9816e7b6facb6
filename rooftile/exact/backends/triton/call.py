"""The arguments that every kernel here takes, from a call's tensors and spec: strides, numbers, compile-time configuration."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.device.row_stats import FAR_OF_FP32, FAR_OF_HALF, ROWS_PADDED
from rooftile.exact.blocks.lists import steps_of_lists
from rooftile.exact.spec import Options, Spec

# keys and values of the heads that run together should stay in the L2 cache: half of an H200's 60 MB, most of an A100's 40 MB
WAVE_BYTES = 30 * 2**20


class KernelSpec(NamedTuple):
    """The compile-time configuration of a kernel: its argument SPEC."""

    GROUP: int
    D: int
    DV: int
    PACKED: bool
    LEFT: bool
    RIGHT: bool
    PREFIX: bool
    CHUNK: bool
    FOLD: bool  # the scale rides in the exponential's multiply-add, since nothing else touches the scores
    NATURAL: bool  # scores in natural units, where every bit of lse counts or a bias is added; else in units of log2
    FAR: float  # an lse beyond it, in these units, is not precise enough to compute weights from it alone (see `far_rows`)
    SOFTCAP: bool
    BIAS: bool
    ALIBI: bool
    DROPOUT: bool
    PLACED: bool  # draws and distances count places in a larger problem
    SINKS: bool
    FP16: bool  # the gradients of the scores have fp16's narrow range
    PRECISION: str  # how fp32 numbers are multiplied
    BLOCK_D: int  # head dims as tiles hold them
    BLOCK_DV: int
    REST_D: int = 0  # columns beyond BLOCK_D, in a tile of their own
    REST_DV: int = 0
    BLOCKS: bool = False  # the walk follows lists of blocks
    LIST_T: int = 0  # queries of a listed block
    LIST_S: int = 0  # and keys
    BITS: bool = False  # some listed blocks are seen in part


class Constants(NamedTuple):
    """Numbers and configuration that follow from a spec alone; computed once per spec."""

    numbers: tuple[float | int, ...]  # scale, softcap, left, right, prefix, chunk, threshold, keep_scale
    spec: KernelSpec
    forward_spec: KernelSpec  # with the head dims as the forward holds them


class TritonCall(NamedTuple):
    """One attention call as the launchers see it."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    spec: Spec
    B: int
    H: int
    Hk: int
    T: int  # packed: the total
    S: int  # packed: the total
    numbers: tuple[float | int, ...]
    constants: dict[str, Any]

    @property
    def packed(self) -> bool:
        return self.spec.layout == "packed"

    @property
    def padded_T(self) -> int:
        """The rows of a head in the backward's row statistics: whole tiles if dense, so that they need no bounds."""
        return self.T if self.packed else -(-self.T // ROWS_PADDED) * ROWS_PADDED

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The shape of lse."""
        return (self.H, self.T) if self.packed else (self.B, self.H, self.T)

    @property
    def wave(self) -> int:
        """How many query heads run together (see `schedule`)."""
        head = self.S * (self.spec.dim + self.spec.dim_v) * self.k.element_size()
        return min(max(WAVE_BYTES // max(head, 1), 1) * self.spec.group, self.B * self.H)

    def programs(self, length: int, block: int, heads: int) -> tuple[int, int]:
        """How many programs cover `length` rows of `heads` heads, and how many tiles a dense head has."""
        if self.packed:
            return (length // block + self.B) * heads, 0
        tiles = -(-length // block)
        return tiles * heads * self.B, tiles

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """(batch, position, head) of q, k and v, then the bias's four and ALiBi's two."""
        return strides_of(self.q), strides_of(self.k), strides_of(self.v), self.bias_strides, self.alibi_strides

    @property
    def bias_strides(self) -> tuple[int, ...]:
        """(batch, head, row, column), 0 along what is broadcast."""
        bias = self.options.bias
        if bias is None:
            return (0, 0, 0, 0)
        strides = tuple(0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True))
        return (0, *strides) if self.packed else strides

    @property
    def alibi_strides(self) -> tuple[int, int]:
        alibi = self.options.alibi
        if alibi is None:
            return (0, 0)
        return (0, alibi.stride(0)) if alibi.ndim == 1 else (alibi.stride(0), alibi.stride(1))

    @property
    def option_tensors(self) -> tuple[Tensor, ...]:
        return with_stand_ins(self.options, self.q)

    @property
    def list_numbers(self) -> tuple[int, ...]:
        """The lists of queries: batch and head strides, query heads of a list, the longest list, its blocks with bits."""
        counts, indices, bits = self.options.block_counts, self.options.block_indices, self.options.block_bits
        if counts is None or indices is None:
            return (0, 0, 1, 0, 0)
        steps = steps_of_lists(counts, self.Hk, self.spec.group)
        return *steps, indices.shape[-1], 0 if bits is None else bits.shape[3]

    @property
    def key_list_numbers(self) -> tuple[int, ...]:
        """`list_numbers`, and of the lists of keys batch and head strides and the longest list."""
        counts, entries = self.options.key_counts, self.options.key_entries
        if counts is None or entries is None:
            return *self.list_numbers, 0, 0, 0
        return *self.list_numbers, *steps_of_lists(counts, self.Hk, self.spec.group)[:2], entries.shape[-2]


def with_stand_ins(options: Options, q: Tensor) -> tuple[Tensor, ...]:
    """bias, alibi, sinks, seed, cu_q, cu_k; q stands in for an absent one, which no kernel reads."""
    return tuple([q if x is None else x for x in options[:6]])


def lists_of_queries(options: Options, q: Tensor) -> tuple[Tensor, ...]:
    """Counts, indices and bits of the lists of queries; q stands in for absent ones."""
    return tuple([q if x is None else x for x in (options.block_counts, options.block_indices, options.block_bits)])


def lists_of_keys(options: Options, q: Tensor) -> tuple[Tensor, ...]:
    """Counts and entries of the lists of keys, and the bits of the lists of queries; q stands in for absent ones."""
    return tuple([q if x is None else x for x in (options.key_counts, options.key_entries, options.block_bits)])


def call_of(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> TritonCall:
    """The call; copies a tensor only if its last axis is not contiguous."""
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.contiguous())
    if spec.layout == "packed":
        B, (T, H), (S, Hk) = options.cu_q.shape[0] - 1, q.shape[:2], k.shape[:2]
    else:
        (B, T, H), (S, Hk) = q.shape[:3], k.shape[1:3]
    constants = constants_of(spec)
    return TritonCall(q, k, v, options, spec, B, H, Hk, T, S, constants.numbers, {"SPEC": constants.spec})


@cache
def constants_of(spec: Spec) -> Constants:
    """The numbers and compile-time flags that every kernel takes for this spec."""
    mask = spec.mask
    (chunk,) = mask.chunks or (0,)
    # dropped when 32 random bits, as an unsigned integer, are below it; crosses as a signed one so that its type never varies
    threshold = min(round(spec.dropout * 2**32), 2**32 - 1)
    threshold -= 2**32 * (threshold >= 2**31)
    numbers = (
        spec.scale, spec.softcap, mask.left or 0, mask.right or 0, mask.prefix or 0, chunk,
        threshold, 1.0 / (1.0 - spec.dropout),
    )  # fmt: skip
    plain = not (spec.softcap or spec.has_bias or spec.has_alibi)
    known = KernelSpec(
        GROUP=spec.group,
        D=spec.dim,
        DV=spec.dim_v,
        PACKED=spec.layout == "packed",
        LEFT=mask.left is not None,
        RIGHT=mask.right is not None,
        PREFIX=mask.prefix is not None,
        CHUNK=bool(chunk),
        FOLD=plain and spec.scale > 0 and spec.dtype.itemsize == 2,
        NATURAL=spec.dtype.itemsize == 4 or spec.has_bias,
        FAR=math.inf if spec.partial else FAR_OF_FP32 if spec.dtype.itemsize == 4 else FAR_OF_HALF,
        SOFTCAP=spec.softcap > 0,
        BIAS=spec.has_bias,
        ALIBI=spec.has_alibi,
        DROPOUT=spec.dropout > 0,
        PLACED=spec.placed,
        SINKS=spec.has_sinks,
        FP16=spec.dtype == torch.float16,
        # fp32 means fp32: three tf32 products on the tensor cores miss the tolerance on long sums
        PRECISION="ieee" if spec.dtype.itemsize == 4 else "tf32",
        BLOCK_D=padded(spec.dim),
        BLOCK_DV=padded(spec.dim_v),
        BLOCKS=spec.block_size is not None,
        LIST_T=spec.block_size[0] if spec.block_size else 0,
        LIST_S=spec.block_size[1] if spec.block_size else 0,
        BITS=spec.has_bits,
    )
    (block, rest), (block_v, rest_v) = split(spec.dim), split(spec.dim_v)
    held = known._replace(BLOCK_D=block, REST_D=rest, BLOCK_DV=block_v, REST_DV=rest_v)
    return Constants(numbers, known, held)


def padded(dim: int) -> int:
    """A head dim as the kernels hold it: a power of two, at least the 16 that a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())


def split(dim: int) -> tuple[int, int]:
    """A head dim as two powers of two that add up to it (80 = 64 + 16), or as one padded one and nothing."""
    block = 1 << (dim.bit_length() - 1)
    rest = dim - block
    if rest >= 16 and rest & (rest - 1) == 0:
        return block, rest
    return padded(dim), 0


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """(batch, position, head)."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])
