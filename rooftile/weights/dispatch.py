"""Backends of products with quantised weights: `hopper` and `triton` (our kernels), `library` (PyTorch's) and `definition`.

Each refuses in sentences, as the backends of attention do. Which one is fastest depends on the rows of x, so it is chosen in the
operator, where they are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.numerics.quantised_rows import LONGEST_ROW, rows_as_codes
from rooftile.runtime.devices import (
    INTERPRETED,
    capability,
    lack_of_gluon,
    lack_of_triton,
    lacks_fp8,
    runs_kernels,
    warn_without_triton,
)  # fmt: skip
from rooftile.runtime.dispatch import Dispatcher
from rooftile.runtime.explanation import Explanation
from rooftile.weights import definition, library
from rooftile.weights.definition import Product
from rooftile.weights.formats import weight_format
from rooftile.weights.weight import Parts

NAMES = ("hopper", "triton", "library", "definition")
# Rows up to which the portable kernels come before PyTorch's products: for FP8, for formats whose activations keep 16 bits (there
# a product follows a pass that dequantises the weight), and for others
MANY_IN_FP8, MANY_IN_16_BITS, MANY_OF_OTHERS = 64, 160, 512
# ... and those for Hopper. On an H100 PyTorch's FP8 products are faster from some 300 rows on, and a product after that pass
# from some 2,500; INT8 has a kernel for any number (h100-linear.jsonl).
MOST_ON_HOPPER = {"fp8": 256, "fp8_tile": 512, "int8": None}
MOST_IN_16_BITS_ON_HOPPER = 2048
# rows up to which a weight whose codes become 16-bit numbers is multiplied as fast as one in 16 bits, on an H100
WIDENED_AS_FAST = 256


class ProductCall(NamedTuple):
    """All that a refusal depends on."""

    x: Tensor
    x_scales: Tensor | None
    parts: Parts
    bias: Tensor | None
    product: Product


class Backend(Protocol):
    """A backend's module, or the class below."""

    def quantise(self, x: Tensor, format: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes and scales of rows."""

    def multiply(self, x: Tensor, x_scales: Tensor | None, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
        """The product."""


class _Definition:
    """The definition, which refuses nothing."""

    quantise = staticmethod(rows_as_codes)
    multiply = staticmethod(definition.multiply)


class _Triton:
    """Our kernels, imported when they are used."""

    @staticmethod
    def quantise(x: Tensor, format: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        from rooftile.numerics import row_kernels

        return row_kernels.quantise(x, format, scale)

    @staticmethod
    def multiply(x: Tensor, x_scales: Tensor | None, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
        from rooftile.weights.triton import launch

        return launch.multiply(x, x_scales, parts, bias, product)


class _Hopper:
    """Our kernels in Gluon; rows are quantised by our kernel in Triton."""

    quantise = staticmethod(_Triton.quantise)

    @staticmethod
    def multiply(x: Tensor, x_scales: Tensor | None, parts: Parts, bias: Tensor | None, product: Product) -> Tensor:
        from rooftile.weights.hopper import launch

        return launch.multiply(x, x_scales, parts, bias, product)


class _Library:
    """PyTorch's products; rows are quantised by our kernel."""

    quantise = staticmethod(_Triton.quantise)
    multiply = staticmethod(library.multiply)


BACKENDS: dict[str, Backend] = {
    "hopper": _Hopper(),
    "triton": _Triton(),
    "library": _Library(),
    "definition": _Definition(),
}


def chosen(call: ProductCall, name: str) -> Backend:
    """Returns the named backend, or without a name the fastest that takes this call.

    Raises:
        Unsupported: the named one does not take it, or none is named and the chip has no FP8.
    """
    if not name and (reason := lack_of_fp8(call.product.format, call.x.device)):
        # the definition has it, many times slower than 16 bits: who wants that says so
        raise Unsupported(f"{reason}; backend='definition' computes the same, slowly")
    found = DISPATCHER.select(call, name or None)
    if not name:
        warn_without_triton(call.x.is_cuda)
    return BACKENDS[found]


def order(asked: ProductCall) -> tuple[str, ...]:
    """Returns the names of all backends, fastest first."""
    rows, format = asked.x.shape[0], asked.product.format
    if rows <= last_of_portable(format):
        return NAMES
    if rows <= last_on_hopper(format):
        return ("hopper", "library", "triton", "definition")
    return ("library", "hopper", "triton", "definition")


def last_of_portable(format: str) -> int:
    """Returns the rows up to which the portable kernels come before PyTorch's products."""
    if format == "fp8":
        return MANY_IN_FP8
    return MANY_IN_16_BITS if weight_format(format).activations is None else MANY_OF_OTHERS


def last_on_hopper(format: str) -> float:
    """Returns the rows up to which the kernels for Hopper are first there."""
    most = MOST_ON_HOPPER.get(format, MOST_IN_16_BITS_ON_HOPPER)
    return math.inf if most is None else most


def refusals(name: str, asked: ProductCall) -> Iterator[str]:
    """Yields why a backend does not take a call: what came; what it has."""
    if name == "definition":
        return
    x, product = asked.x, asked.product
    interpreted = INTERPRETED and x.device.type == "cpu" and name == "triton"
    if not interpreted and not x.is_cuda:
        yield f"tensors are on {x.device}; needs a CUDA GPU and Triton"
        return
    if not interpreted and (lack := lack_of_triton()):
        yield lack
        return
    chip = (9, 0) if interpreted else capability(x.device)
    if chip < (8, 0):
        yield f"compute capability {chip[0]}.{chip[1]}; needs 8.0 (Ampere)"
    if reason := lack_of_fp8(product.format, x.device):
        yield reason
    if torch.float64 in (x.dtype, product.out_dtype):
        yield "float64; has float32, bfloat16, float16"
    if name == "hopper":
        yield from _hopper_refusals(asked, chip)
    else:
        yield from (library.refusals if name == "library" else _triton_refusals)(asked)


def lack_of_fp8(format: str, device: torch.device) -> str:
    """Says why a device does not multiply a format; nothing if it does."""
    if format not in ("fp8", "fp8_tile") or not lacks_fp8(device):
        return ""
    major, minor = capability(device)
    return f"FP8 products on compute capability {major}.{minor}; needs 8.9: w8 and int4 multiply in 16 bits everywhere"


def _hopper_refusals(asked: ProductCall, chip: tuple[int, int]) -> Iterator[str]:
    if lack := lack_of_hopper(chip):
        yield lack
        return
    from rooftile.weights.hopper import launch

    yield from launch.refusals(asked)
    if asked.product.activations is not None:
        yield from _triton_refusals(asked)


def lack_of_hopper(chip: tuple[int, int]) -> str:
    """Says why our kernels for Hopper do not run on a chip of this compute capability; an empty text if they do."""
    return f"compute capability {chip[0]}.{chip[1]}; needs 9.0 (Hopper)" if chip != (9, 0) else lack_of_gluon()


def _triton_refusals(asked: ProductCall) -> Iterator[str]:
    product = asked.product
    kind, group, K = weight_format(product.format), product.group, product.K
    if kind.activations is None and not _fits(group, K):
        yield f"groups of {group} numbers; has powers of two from 16 on, and whole rows"
    if kind.activations is not None and K > LONGEST_ROW and asked.x_scales is None:
        yield f"rows of {K:,} numbers; has up to {LONGEST_ROW:,} to quantise at once"


def _fits(group: int, K: int) -> bool:
    return group == K or (group >= 16 and group & (group - 1) == 0)


def unpacks(parts: Parts, format: str, group: int, K: int, dtype: torch.dtype) -> bool:
    """Whether the kernel dequantises such a weight."""
    if dtype == torch.float64 or format == "fp8_tile" or not _fits(group, K):
        return False
    codes = parts.codes
    return runs_kernels(codes) and (not codes.is_cuda or capability(codes.device) >= (8, 0))


def _runs(name: str, asked: ProductCall) -> str:
    if name == "definition" and lack_of_fp8(asked.product.format, asked.x.device):
        return "runs if it is named"
    if name == "library" and asked.product.activations is None:
        return "runs, after a pass that dequantises the weight: a weight in 16 bits is faster for so many rows"
    best = MANY_IN_FP8 if asked.product.format == "fp8_tile" else WIDENED_AS_FAST
    if asked.x.shape[0] > best and (asked.product.format == "fp8_tile" or asked.product.activations is None):
        return "runs; a weight in 16 bits is faster for so many rows"
    return "runs"


DISPATCHER: Dispatcher[ProductCall] = Dispatcher(
    "multiply this weight", order=order, refusals=lambda name, asked: tuple(refusals(name, asked))
)


def explain(asked: ProductCall) -> Explanation:
    """Says which backend takes a call, and why the faster ones do not."""
    return DISPATCHER.explain_choice(asked, _runs)
