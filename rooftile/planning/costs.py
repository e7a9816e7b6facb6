"""The time of a layer in a format by the machine's measured ceilings.

    time = max(FLOPs / rate, bytes / bandwidth) + launch, for each kernel, one after the other

On a GPU a product's tiles may fill the last wave of multiprocessors only in part, its result is written after the last step, when
matrix units have nothing to do, and its first step waits for its tiles.

A layer in its own dtype is one product. Formats that quantise activations have a kernel before it that reads rows and writes
their codes. A CPU computes quantised products by their definition: it writes the dequantised weight, and multiplies in fp32.
Roofs come from the diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, gcd
from typing import NamedTuple

import torch

from rooftile.diagnosis.machine import roofs_of
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.verdicts.roofs import Roofs
from rooftile.hardware.ceilings import Ceilings
from rooftile.planning.formats import KEPT, weight_bytes
from rooftile.weights import weight_format
from rooftile.weights.files.formats import SPARSE
from rooftile.weights.formats import parsed

# cuSPARSELt's rate over the dense one for many rows; twice is the most that the hardware has
SPARSE_GAIN = 1.45
# a launch of more than half of the time is what bounds it
MOST_LAUNCH = 0.5
# times of twice the rows over the times of the rows, below and above which memory and compute bound
FLAT, STEEP = 1.2, 1.6

# These four describe a product on a GPU: its tile, the most parts that its K is split into, the time in which its first tiles
# come, and how much of its result's traffic hides behind no arithmetic. All are fitted to the layers of BERT and ViT on an H200
TILE, MOST_SPLITS, FILL_US, SHOWN = (128, 256), 4, 4.0, 0.65
# the part of the rate that cuBLAS reaches, by the multiple of bytes at which all rows begin: BERT's head has 30,522 columns, and
# GPT-2's 50,257; eight bytes are taken for four
ALIGNED = {16: 1.0, 8: 0.32, 4: 0.32, 2: 0.14, 1: 0.14}
# the part of a copy's rate that a sum over rows reaches, fitted to the same layers
SUM_RATE = 0.7


class Pass(NamedTuple):
    """One kernel: its FLOPs, the dtype of their rate, and its bytes through main memory.

    sizes: of a product: rows and columns of its result. written: bytes of its result. aligned: the multiple of bytes at which
    all rows begin, up to 16.
    """

    flops: int
    bytes: int
    dtype: str
    sizes: tuple[int, int] | None = None
    written: int = 0
    aligned: int = 16


class DeviceCeilings:
    """A device and its ceilings."""

    def __init__(self, device: torch.device, ceilings: Ceilings) -> None:
        self.device, self.ceilings = device, ceilings
        is_gpu = device.type == "cuda"
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 0
        self._roofs: dict[str, Roofs] = {}

    def roofs(self, dtype: str) -> Roofs:
        """Returns the roofs of a product in a dtype."""
        if dtype not in self._roofs:
            product = OperatorRow(
                module="", op="aten::mm", phase="forward", calls=1, flops=0, special=0, bytes=0, where="", dtype=dtype,
                device=self.device.type, key=(), indices=(),
            )  # fmt: skip
            self._roofs[dtype] = roofs_of(product, self.device, self.ceilings)
        return self._roofs[dtype]

    def us(self, passes: Iterable[Pass]) -> float:
        """Returns the time of kernels that run one after the other, in µs."""
        return sum(max(self._parts(one)) + self._before(one) for one in passes)

    def ridge(self, dtype: str) -> float:
        """Returns the FLOPs per byte from which on arithmetic takes longer than memory."""
        roofs = self.roofs(dtype)
        return roofs.flops_per_s / roofs.bytes_per_s

    def bound(self, passes: Sequence[Pass]) -> str:
        """Returns what bounds kernels together: "memory", "compute" or "overhead"."""
        launches = sum(self.roofs(one.dtype).fixed_us for one in passes)
        if launches > MOST_LAUNCH * self.us(passes):
            return "overhead"
        longest = max(passes, key=lambda one: max(self._parts(one)))
        compute_us, memory_us = self._parts(longest)
        return "compute" if compute_us > memory_us else "memory"

    def _before(self, one: Pass) -> float:
        """The time of a launch, and on a GPU until a product has its first tiles."""
        fill_us = FILL_US if self._multiprocessors and one.sizes is not None else 0.0
        return self.roofs(one.dtype).fixed_us + fill_us

    def _parts(self, one: Pass) -> tuple[float, float]:
        roofs = self.roofs(one.dtype)
        compute_us, memory_us = one.flops / roofs.flops_per_s * 1e6, one.bytes / roofs.bytes_per_s * 1e6
        if self._multiprocessors and one.sizes is not None:
            compute_us /= share_of_waves(*one.sizes, self._multiprocessors) * ALIGNED[one.aligned]
            compute_us += SHOWN * one.written / roofs.bytes_per_s * 1e6
        return compute_us, memory_us


def share_of_waves(rows: int, columns: int, multiprocessors: int) -> float:
    """Returns which part of all multiprocessors' time the tiles of a product fill, at the best number of parts of its K."""
    tiles = ceil(rows / TILE[0]) * ceil(columns / TILE[1])
    counts = [tiles * splits for splits in range(1, MOST_SPLITS + 1)]
    return max(count / (ceil(count / multiprocessors) * multiprocessors) for count in counts)


def passes_of(
    M: int, N: int, K: int, word: str, dtype: str, itemsize: int, *, on_gpu: bool, gets_codes: bool = False, few: int = 0
) -> list[Pass]:  # fmt: skip
    """Returns the kernels of a product of x (M, K) with a weight (N, K) in a format.

    dtype, itemsize: of x and the result. gets_codes: whether x is quantised before, by another kernel. few: rows up to which a
    2:4 weight has a kernel of ours (`two_four.backends.last_of_ours`).
    """
    flops, x, y, weight = 2 * M * N * K, M * K * itemsize, M * N * itemsize, weight_bytes(N, K, word, itemsize)
    aligned = _alignment(N, K, itemsize)
    if word == KEPT:
        return [Pass(flops, x + y + weight, dtype, (M, N), y, aligned)]
    if word == SPARSE and on_gpu:
        return [Pass(flops if few >= M else round(flops / SPARSE_GAIN), x + y + weight, dtype, (M, N), y)]
    if word == SPARSE:
        dense = N * K * itemsize
        return [Pass(0, weight + dense, dtype), Pass(flops, x + y + dense, dtype)]
    activations = weight_format(parsed(word)[0]).activations
    found = []
    if activations is not None:
        x, read = M * K, x
        if not gets_codes:
            found.append(Pass(0, read + x, dtype))
    if on_gpu:
        rate = dtype if activations is None else "int8" if activations == "int8" else "fp8"
        return [*found, Pass(flops, x + y + weight, rate, (M, N), y)]
    wide = 4 * N * K
    return [*found, Pass(0, weight + wide, "fp32"), Pass(flops, x + y + wide, "fp32")]


def training_passes_of(
    M: int, N: int, K: int, word: str, dtype: str, itemsize: int, *, on_gpu: bool, needs_dx: bool, has_bias: bool
) -> list[Pass]:  # fmt: skip
    """Returns the kernels of a layer's forward and backward, prepared for a format by `rooftile.qat.prepare`.

    Weights are quantised in each step. dW, and dX where it is needed, are products of dequantised numbers. dtype, itemsize: as in
    `passes_of`, and of the parameter.
    """
    flops, x, y, w = 2 * M * N * K, M * K * itemsize, M * N * itemsize, N * K * itemsize
    # each of the three products has x, y and the weight, or their gradients, as its inputs and its result
    aligned = _alignment(N, K, itemsize)
    product = Pass(flops, x + y + w, dtype, (M, N), y, aligned)
    dx, dw = product._replace(sizes=(M, K), written=x), product._replace(sizes=(N, K), written=w)
    backward = [dx] * needs_dx + [dw] + [Pass(0, round(y / SUM_RATE), dtype)] * has_bias
    if word == KEPT:
        return [*passes_of(M, N, K, word, dtype, itemsize, on_gpu=on_gpu), *backward]
    codes = weight_bytes(N, K, word, itemsize)
    quantised, dequantised = Pass(0, w + codes, dtype), Pass(0, codes + w, dtype)
    activations = weight_format(parsed(word)[0]).activations
    if on_gpu and activations is None:
        forward = [dequantised, product]
    else:
        forward = passes_of(M, N, K, word, dtype, itemsize, on_gpu=on_gpu)
    rows = [Pass(0, 2 * x + 2 * M * K, dtype)] if activations is not None else []
    return [quantised, *forward, *([dequantised] * needs_dx), *rows, *backward]


def _alignment(N: int, K: int, itemsize: int) -> int:
    """Returns the multiple of bytes, up to 16, at which all rows of a weight (N, K) and of the result begin."""
    return gcd(16, N * itemsize, K * itemsize)


def verdict_of(ratio: float) -> str:
    """Returns what a layer is bound by whose time with twice the rows is `ratio` of its time: "both" between the two."""
    return "memory" if ratio < FLAT else "compute" if ratio > STEEP else "both"
