"""`quantise_weight`: codes and scales of a weight in 16 or 32 bits.

fp8 and int8 follow `rooftile.numerics`: one division per scale, one multiplication per number. w8 and int4 follow the rule of
compressed-tensors: the scale is amax / 127.5 or amax / 7.5, rounded to bf16 before codes are taken, and all codes are used,
also the one that formats of `rooftile.numerics` keep for NaN: a weight has no NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.numerics.block_floating import RULES, Rule, quantise_blocks
from rooftile.numerics.formats import FP8_E4M3, INT8, encode
from rooftile.numerics.quantised_rows import LONGEST_ROW
from rooftile.numerics.scaling import divided, scales_of
from rooftile.numerics.two_level import outer_scale, quantise_nvfp4
from rooftile.runtime.devices import lacks_fp8, runs_kernels
from rooftile.runtime.operators import replaced, transforms_active
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.formats import LONGEST_INT8, TILE, WeightFormat, group_of, weight_format
from rooftile.weights.packing import OFFSET, pack
from rooftile.weights.weight import QuantisedWeight

# numbers that are quantised at once: an fp32 copy of a large weight would take twice its memory. The temporary tensors of fewer
# numbers stay in a CPU's caches, so there it takes less time, too
AT_ONCE, AT_ONCE_ON_A_CPU = 1 << 24, 1 << 18
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Rows(NamedTuple):
    """Codes and scales of some rows."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@answers_foreign_words
def quantise_weight(
    weight: Tensor, format: str, *, group: int | None = None, rule: Rule = "floor", zero_points: bool = False
) -> QuantisedWeight:
    """Quantises a weight, for `linear`.

    Args:
        weight: (N, K), bf16, fp16, fp32 or fp64, any strides; computed in fp32.
        format: the codes of weights, what shares a scale, and what activations are quantised to:

            - fp8: e4m3, a row; activations in e4m3 with a scale per token.
            - fp8_tile: e4m3, a tile of 128 x 128; activations in e4m3 with a scale for 128 channels of a token.
            - int8: a row; activations in int8 with a scale per token; products are exact in int32.
            - w8: int8, a row; activations stay in 16 bits, as in all formats below.
            - int4: `group` numbers of a row.
            - mxfp8, mxfp4: e4m3 or e2m1, 32 numbers of a row share a power of two.
            - nvfp4: e2m1, 16 numbers of a row share an e4m3 scale, and all of them an fp32 one.

            No scale is below 2^-126 (2^-127 of mxfp8 and mxfp4; two scales of nvfp4): smaller weights are rounded in its steps.
        group: int4: 32, 64, 128 (the default) or K numbers share a scale; -1 means K, a whole row.
        rule: mxfp8, mxfp4: how a power of two follows from the largest of 32 numbers, as in `rooftile.numerics.quantise_blocks`:
            "floor", the standard's rule, by which the largest may saturate, or "round_up", by which none does.
        zero_points: int4: whether each group has a zero point, which fits groups that lie on one side of zero.

    Raises:
        InvalidInput: the format does not exist or has no such option, weight is not finite or not (N, K), or K is not a
            multiple of the group.

    Example:
        >>> weight = quantise_weight(torch.randn(256, 512), "int4")
        >>> y = linear(torch.randn(3, 512), weight)
    """
    return _weight(weight, format, group, zero_points, rule, None, None, False)[0]


def quantise_trained(
    w: Tensor, format: str, group: int | None, *, rule: Rule = "floor", flag: Tensor | None = None, mask: Tensor | None = None,
    wants_inside: bool = False,
) -> tuple[QuantisedWeight, Tensor | None]:  # fmt: skip
    """`quantise_weight` of a weight in training: on a GPU all of it is one pass, where the kernel has the format.

    Args:
        w: (N, K).
        format: as there.
        group: as there.
        rule: as there.
        flag: int32 (1,) on the device of w, set to 1 where w is not finite, in place of an error that waits for the device.
        mask: bool (N, K); what it leaves out counts as 0.
        wants_inside: whether to say which numbers lie inside the format's, or at most half a code beyond.

    Returns:
        The weight; and the bits of what lies inside (N, K / 8), for `keep_inside`, where the kernel has written them.
    """
    return _weight(w, format, group, False, rule, flag, mask, wants_inside)


def raise_flag(flag: Tensor, *found: Tensor) -> None:
    """Raises a flag where a tensor is not finite, in a pass that waits for nothing."""
    for x in found:
        # the largest size is NaN where a number is, and infinite in fp32 where one of fp64 is too large
        largest = torch.linalg.vector_norm(x.detach(), torch.inf).float()
        flag.bitwise_or_(largest.isfinite().logical_not().to(flag.dtype))


def _weight(
    w: Tensor, format: str, group: int | None, zero_points: bool, rule: Rule, flag: Tensor | None, mask: Tensor | None,
    wants_inside: bool,
) -> tuple[QuantisedWeight, Tensor | None]:  # fmt: skip
    """Quantises a weight; without a flag it raises an error where w is not finite."""
    kind = weight_format(format)
    _check(w, kind, zero_points, rule)
    w = w.detach()
    N, K = w.shape
    group = group_of(kind, K, group)
    if w.is_cuda and not zero_points and _runs_kernel(w, kind, group):
        return _in_one_pass(w, kind, group, rule, flag, mask, wants_inside)
    if mask is not None:
        # no product: infinity times zero is NaN
        w = torch.where(mask, w, 0.0)
    # whole tiles
    parts = w.split(max((AT_ONCE if w.is_cuda else AT_ONCE_ON_A_CPU) // K // TILE, 1) * TILE)
    if flag is not None:
        raise_flag(flag, w)
    elif not w.is_meta:
        _check_finite(parts)
    outer = outer_scale(torch.stack([_size(part.float()) for part in parts])).view(1, 1) if format == "nvfp4" else None
    found = [_quantised(part.float(), kind, group, zero_points, rule, outer) for part in parts]
    codes, scales = (torch.cat(parts) for parts in zip(*((x.codes, x.scales) for x in found), strict=True))
    zeros = torch.cat([x.zeros for x in found if x.zeros is not None]) if zero_points else None
    return QuantisedWeight(codes, scales, zeros, None, format, group, (N, K), outer), None


def _check(w: Tensor, kind: WeightFormat, zero_points: bool, rule: str) -> None:
    if not isinstance(w, Tensor) or w.dtype not in _FLOATS or w.ndim != 2 or not w.numel():
        what = f"{w.dtype} {tuple(w.shape)}" if isinstance(w, Tensor) else type(w).__name__
        raise InvalidInput(
            f"weight is {what}; must be a tensor (N, K) of bfloat16, float16, float32 or float64 with at least one number"
        )
    if zero_points and kind.name != "int4":
        raise InvalidInput(f"zero_points is True and format {kind.name!r}; only int4 has zero points")
    check_rule(rule, kind.has_exponents, f"format {kind.name!r}")
    if kind.name == "int8" and w.shape[1] > LONGEST_INT8:
        raise InvalidInput(
            f"weight has rows of K = {w.shape[1]:,} numbers; int8 sums of at most {LONGEST_INT8:,} are exact: take w8 or fp8"
        )


def _size(w: Tensor) -> Tensor:
    """The largest absolute value of the finite numbers."""
    return torch.where(w.isfinite(), w, 0.0).abs().amax()


def check_rule(rule: object, has_exponents: bool, what: str) -> None:
    """Raises InvalidInput for a rule that does not exist, or is not the default where scales are no powers of two."""
    if rule not in RULES:
        raise InvalidInput(f"rule is {rule!r}; must be one of {', '.join(RULES)}")
    if rule != RULES[0] and not has_exponents:
        raise InvalidInput(f"rule is {rule!r} and {what}; only mxfp8 and mxfp4 have it: leave it out")


def _check_finite(parts: Sequence[Tensor]) -> None:
    start = 0
    for w in parts:
        # numbers of fp64 that are infinite in fp32 are lost, too
        lost = ~(w.float() if w.dtype == torch.float64 else w).isfinite()
        if lost.any():
            row, column = (int(x) for x in lost.nonzero()[0])
            raise InvalidInput(
                f"weight is {w[row, column].item()} at row {start + row}, column {column}; weights must be finite to be "
                "quantised: repair the checkpoint, or leave this weight in 16 bits"
            )
        start += len(w)


def _runs_kernel(w: Tensor, kind: WeightFormat, group: int) -> bool:
    """Whether one kernel quantises w, which is on a GPU. It holds a row, and the two codes of a byte."""
    if w.dtype == torch.float64 or torch.compiler.is_compiling() or transforms_active() or replaced(w):
        return False
    if kind.codes == torch.float8_e4m3fn and lacks_fp8(w.device):
        return False
    is_row = kind.name not in ("fp8_tile", "nvfp4") and w.shape[1] <= LONGEST_ROW and group % (1 + kind.is_packed) == 0
    return is_row and runs_kernels(w)


def _in_one_pass(
    w: Tensor, kind: WeightFormat, group: int, rule: Rule, flag: Tensor | None, mask: Tensor | None, wants_inside: bool
) -> tuple[QuantisedWeight, Tensor | None]:  # fmt: skip
    from rooftile.weights.triton import weights

    own = torch.zeros(1, dtype=torch.int32, device=w.device) if flag is None else flag
    # eight numbers of a group share a byte; where the largest number sets the scale, all lie inside
    can_say = group >= 8 and kind.name not in ("fp8", "int8")
    codes, scales, inside = weights.quantise(w, kind, group, own, mask, wants_inside and can_say, rule)
    # a look at a flag of its own waits for the device
    if flag is None and own.item():
        _check_finite([w if mask is None else torch.where(mask, w, 0.0)])
    return QuantisedWeight(codes, scales, None, None, kind.name, group, (w.shape[0], w.shape[1]), None), inside


def _quantised(w: Tensor, kind: WeightFormat, group: int, zero_points: bool, rule: Rule, outer: Tensor | None) -> _Rows:
    """Quantises some rows, fp32."""
    if kind.name == "fp8_tile":
        return _by_tiles(w)
    if kind.has_exponents:
        found = quantise_blocks(w, "mxfp4" if kind.is_packed else "mxfp8_e4m3", rule=rule)
        return _Rows(pack(found.values) if kind.is_packed else found.values, found.exponents)
    if outer is not None:
        made = quantise_nvfp4(w, outer=outer)
        return _Rows(pack(made.values), made.scales)
    if kind.name in ("fp8", "int8"):
        format = FP8_E4M3 if kind.name == "fp8" else INT8
        scales, inverse = scales_of(w.abs().amax(1, keepdim=True), format)
        return _Rows(encode(w * inverse, format), scales)
    groups = w.unflatten(1, (-1, group))
    if zero_points:
        return _asymmetric(groups)
    return _symmetric(groups, kind.bits)


def _symmetric(groups: Tensor, bits: int) -> _Rows:
    """Quantises groups (N, G, group): s = amax / (2^b - 1) / 2, codes from -2^(b - 1) to 2^(b - 1) - 1."""
    half = 2.0 ** (bits - 1)
    scales = _rounded(divided(groups.abs().amax(-1), half - 0.5))
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-half, half - 1).flatten(1)
    if bits == 8:
        return _Rows(codes.to(torch.int8), scales)
    return _Rows(pack(codes + OFFSET), scales)


def _asymmetric(groups: Tensor) -> _Rows:
    """Quantises groups (N, G, group) with a zero point, so that zero itself is a code."""
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    # halves: the difference of the largest numbers is infinite
    scales = _rounded(divided(high / 2 - low / 2, 7.5))
    wide = scales.float()
    zeros = (-8 - low / wide).round().clamp(-8, 7)
    codes = (groups / wide.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(-8, 7).flatten(1)
    return _Rows(pack(codes + OFFSET), scales, zeros.to(torch.int8))


def _rounded(scales: Tensor) -> Tensor:
    """Rounds scales to bf16; a group of zeros has 1, and one of the tiniest numbers the smallest normal number."""
    smallest = torch.finfo(torch.bfloat16).smallest_normal
    rounded = scales.clamp(min=smallest).bfloat16()
    return rounded.masked_fill(scales == 0, 1.0)


def _by_tiles(w: Tensor) -> _Rows:
    N, K = w.shape
    padded = torch.nn.functional.pad(w, (0, -K % TILE, 0, -N % TILE))
    tiles = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))  # (N / 128, 128, K / 128, 128)
    scales, inverse = scales_of(tiles.abs().amax((1, 3)), FP8_E4M3)
    codes = encode(tiles * inverse[:, None, :, None], FP8_E4M3)
    return _Rows(codes.flatten(2).flatten(0, 1)[:N, :K].contiguous(), scales)
