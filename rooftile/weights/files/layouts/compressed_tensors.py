"""compressed-tensors, which llm-compressor writes: groups of modules with a scheme each, and a list of modules that stay."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.layouts.fp8 import input_scale_of
from rooftile.weights.files.methods import FROM_16_BITS
from rooftile.weights.files.tensors import (
    check_dtype,
    check_shape,
    checked_codes,
    checked_scales,
    group_of,
    int4_weight,
    names_in,
    order_of,
    packed_codes,
    refused,
    signed_codes,
    w8_weight,
    whole,
)
from rooftile.weights.formats import TILE, full_names
from rooftile.weights.packing import unpack_words

# layouts -> the formats of `quantise_weight` that they hold
PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
LAYOUTS = (*PLAIN, "pack-quantized", "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_BLOCKS = {"mxfp8-quantized": "mxfp8", "mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The scheme of one group of modules."""

    targets: tuple[str, ...]
    layout: str
    format: str
    bits: int
    group: int
    symmetric: bool
    static: bool
    in_another_order: bool  # groups have columns that lie apart
    has_inputs: bool  # activations are quantised


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The schemes of a folder."""

    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]
    folder: str
    has_cache_scheme: bool = False

    def check(self, modules: Collection[str]) -> None:
        """Raises InvalidInput for a group that matches nothing, and for two that match one module."""
        if self.has_cache_scheme:
            logging.getLogger(__name__).warning(
                '%s: its kv_cache_scheme is not used: the cache has the dtype that kv_dtype says; "fp8" finds scales of its own',
                self.folder,
            )
        wider = dict.fromkeys(scheme.format for scheme in self.schemes if scheme.has_inputs and scheme.layout in _BLOCKS)
        if wider:
            logging.getLogger(__name__).warning(
                "%s: its activations in %s are not rounded: no kernel here multiplies them, so they stay in 16 bits, and answers "
                "may differ from the quantised model's", self.folder, " and ".join(wider),
            )  # fmt: skip
        for scheme in self.schemes:
            for target in scheme.targets:
                if not any(_matches(target, module) for module in modules):
                    raise refused(self.folder, f"has the target {target!r}, which matches no module: correct it in config.json")
        for module in modules:
            found = [scheme for scheme in self.schemes if any(_matches(target, module) for target in scheme.targets)]
            if len(found) > 1 and not self._stays(module):
                raise refused(
                    self.folder,
                    f"has {len(found)} config groups that match {module}; one may: correct it in config.json",
                )

    def formats(self) -> Collection[str]:
        """Returns the formats of its groups."""
        return {scheme.format for scheme in self.schemes}

    def _stays(self, module: str) -> bool:
        return any(_matches(name, module) for name in self.ignored)

    def _scheme(self, module: str) -> Scheme | None:
        if self._stays(module):
            return None
        return next((one for one in self.schemes if any(_matches(target, module) for target in one.targets)), None)

    def covers(self, module: str) -> bool:
        """Whether a group matches it, and no name of the list."""
        return self._scheme(module) is not None

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the tensors of a layout."""
        scheme = self._of(module)
        if scheme.layout == "pack-quantized":
            also = {"weight_g_idx": scheme.in_another_order, "weight_zero_point": not scheme.symmetric}
            needed = [name for name, is_needed in also.items() if is_needed]
            optional = tuple(name for name in also if name not in needed)
            return ("weight_packed", "weight_scale", "weight_shape", *needed), optional
        if scheme.layout in PLAIN:
            names, zero_points = ("weight", "weight_scale"), ("weight_zero_point", "input_zero_point")
            return ((*names, "input_scale"), zero_points) if scheme.static else (names, (*zero_points, "input_scale"))
        codes = "weight" if scheme.layout.startswith("mxfp8") else "weight_packed"
        outer = ("weight_global_scale",) * scheme.layout.startswith("nvfp4")
        return (codes, "weight_scale", *outer), ("input_global_scale",) * len(outer)

    def _of(self, module: str) -> Scheme:
        scheme = self._scheme(module)
        assert scheme is not None
        return scheme

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantisedWeight:
        """The weight (N, K)."""
        scheme = self._of(module)
        if scheme.layout == "pack-quantized":
            return _packed(module, tensors, shape, scheme)
        if scheme.layout in _BLOCKS:
            return _blocks(module, tensors, shape, scheme)
        return _plain(module, tensors, shape, scheme)


def _matches(target: str, module: str) -> bool:
    """Whether a target or a name of the list of what stays means a module: its class, its name or a regular expression."""
    if target == "Linear":
        return True
    names = full_names(module)
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return target in names


def _plain(module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme) -> QuantisedWeight:
    """Codes of 8 bits that are no words."""
    N, K = shape
    dtype = torch.int8 if scheme.format in ("int8", "w8") else torch.float8_e4m3fn
    codes = checked_codes(module, "weight", tensors["weight"], shape, dtype)
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.float().any():
        raise InvalidInput(
            f"{module}.weight_zero_point has zero points for 8 bits; 8 bits are read without: quantise it symmetrically"
        )
    if scheme.format == "fp8_tile":
        scales = checked_scales(module, "weight_scale", tensors["weight_scale"], (-(-N // TILE), -(-K // TILE)))
        return QuantisedWeight(codes, scales.float(), None, None, "fp8_tile", TILE, shape)
    group = whole(module, scheme.group, K)
    stored = tensors["weight_scale"]
    scales = checked_scales(
        module, "weight_scale", stored[:, None] if stored.ndim == 1 and N > 1 == group // K else stored, (N, K // group)
    )
    if scheme.format == "w8":
        return w8_weight(codes, scales, None, group)
    given = input_scale_of(module, tensors, scheme.static)
    return QuantisedWeight(codes, scales.float(), None, None, scheme.format, K, shape, None, given)


def _packed(module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme) -> QuantisedWeight:
    """Codes plus 8 (or 128) in words of int32 along K; zero points in words along N."""
    N, K = shape
    group, packed = whole(module, scheme.group, K), 32 // scheme.bits
    check_dtype(module, "weight_packed", tensors["weight_packed"], torch.int32)
    check_shape(module, "weight_packed", tensors["weight_packed"], (N, -(-K // packed)))
    if tensors["weight_shape"].tolist() != [N, K]:
        raise InvalidInput(f"{module}.weight_shape is {tensors['weight_shape'].tolist()}, due {[N, K]}")
    scales = checked_scales(module, "weight_scale", tensors["weight_scale"], (N, K // group))
    g_idx = tensors.get("weight_g_idx")
    order = None if g_idx is None or (g_idx == -1).all() else order_of(module, "weight_g_idx", g_idx, K, group)
    if scheme.bits == 8:
        return w8_weight(signed_codes(tensors["weight_packed"], K), scales, order, group)
    zeros = None
    if not scheme.symmetric:
        stored = tensors["weight_zero_point"]
        check_dtype(module, "weight_zero_point", stored, torch.int32)
        check_shape(module, "weight_zero_point", stored, (-(-N // packed), K // group))
        zeros = unpack_words(stored.T.contiguous())[:, :N].T
    return int4_weight(packed_codes(tensors["weight_packed"], K), scales, zeros, order, group, shape)


def _blocks(module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme) -> QuantisedWeight:
    """Block floating point."""
    N, K = shape
    group = 16 if scheme.format == "nvfp4" else 32
    whole(module, group, K)
    name, dtype, due = (
        ("weight", torch.float8_e4m3fn, (N, K)) if scheme.format == "mxfp8" else ("weight_packed", torch.uint8, (N, K // 2))
    )
    codes, scales = checked_codes(module, name, tensors[name], due, dtype), tensors["weight_scale"]
    if scheme.format == "nvfp4":
        outer = checked_scales(module, "weight_global_scale", tensors["weight_global_scale"], (1, 1)).float()
        scales = checked_codes(module, "weight_scale", scales, (N, K // group), torch.float8_e4m3fn)
        if (scales.float() < 0).any():
            raise InvalidInput(f"{module}.weight_scale holds a negative scale; scales must be 0 or more: download the file again")
        # the file has the factor of the scales, and we its inverse
        return QuantisedWeight(codes, scales, None, None, "nvfp4", group, shape, 1.0 / outer)
    check_dtype(module, "weight_scale", scales, torch.uint8)
    check_shape(module, "weight_scale", scales, (N, K // group))
    if (scales == 255).any():
        raise InvalidInput(f"{module}.weight_scale holds NaN; weights must be finite: download the file again")
    return QuantisedWeight(codes, scales, None, None, scheme.format, group, shape)


def reader_of(section: Mapping[str, Any], folder: str) -> CompressedTensors:
    """Returns the reader of a folder of compressed-tensors.

    Raises:
        InvalidInput: its configuration asks for what is not read.
    """
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused(folder, "has no config_groups; compressed-tensors must have them: download config.json again")
    sparse = (section.get("sparsity_config") or {}).get("format", "dense")
    if sparse not in ("dense", None):
        raise refused(
            folder, f"has the sparse layout {sparse!r}; must be dense: write it so with llm-compressor, or {FROM_16_BITS}"
        )  # fmt: skip
    if (section.get("transform_config") or {}).get("config_groups"):
        raise refused(folder, "has a transform_config: its activations are rotated at run time, which is not done here: "
                      f"{FROM_16_BITS}")  # fmt: skip
    schemes = tuple(_scheme_of(group, section, folder) for group in groups.values())
    has_cache_scheme = bool(section.get("kv_cache_scheme"))
    return CompressedTensors(schemes, names_in(section, ("ignore",), folder), folder, has_cache_scheme)


def _scheme_of(group: Mapping[str, Any], section: Mapping[str, Any], folder: str) -> Scheme:
    layout = group.get("format") or section.get("format")
    if layout not in LAYOUTS:
        raise refused(
            folder, f"has the layout {layout!r}; read are {', '.join(LAYOUTS)}: write it in one of these with llm-compressor, or "
            f"{FROM_16_BITS}"
        )  # fmt: skip
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type")
    symmetric, strategy = bool(weights.get("symmetric", True)), str(weights.get("strategy"))
    size = group_of(weights, folder) if strategy in ("group", "tensor_group") else -1
    static = inputs is not None and not inputs.get("dynamic", False)
    format = _BLOCKS.get(layout) or _format_of(layout, bits, kind, strategy, weights, inputs, folder)
    # "weight" and "static" order columns without groups of their own
    ordered = weights.get("actorder") in (True, "group", "dynamic")
    targets = names_in(group, ("targets",), folder)
    return Scheme(targets, layout, format, bits or 0, size, symmetric, static, ordered, inputs is not None)


def _format_of(
    layout: str, bits: Any, kind: Any, strategy: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, folder: str
) -> str:
    if layout == "pack-quantized":
        if kind != "int" or bits not in (4, 8) or inputs is not None:
            what = "with" if inputs is not None else "without"
            raise refused(
                folder,
                f"has {layout} of {bits} bits ({kind}) {what} quantised activations; read are int of 4 and 8 without: "
                f"{FROM_16_BITS}",
            )
        return "int4" if bits == 4 else "w8"
    if bits != 8 or kind not in ("float", "int"):
        raise refused(folder, f"has {layout} of {bits} bits ({kind}); read are 8: {FROM_16_BITS}")
    if kind == "int":
        dynamic = inputs is None or (inputs.get("dynamic") and inputs.get("strategy") == "token")
        if not dynamic or (inputs is not None and not inputs.get("symmetric", True)):
            what = "activations with zero points" if dynamic else "static activations"
            raise refused(
                folder, f"has INT8 with {what}; read are dynamic ones without zero points, with a scale per token: {FROM_16_BITS}"
            )  # fmt: skip
        return "w8" if inputs is None else "int8"
    if inputs is None:
        raise refused(
            folder,
            f"has FP8 weights with activations in 16 bits; read are quantised ones: {FROM_16_BITS}",
        )
    if strategy == "block":
        if list(weights.get("block_structure") or ()) != [TILE, TILE]:
            raise refused(folder, f"has tiles of {weights.get('block_structure')}; read are [{TILE}, {TILE}]: {FROM_16_BITS}")
        return "fp8_tile"
    return "fp8"
