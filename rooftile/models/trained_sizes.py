"""The kinds and sizes of the modules of a decoder that is trained, as a `ModelConfig` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rooftile.models.delta.sizes import DeltaSizes
from rooftile.models.linear.sizes import LinearSizes, PerformerSizes
from rooftile.models.mamba.sizes import Mamba2Sizes, MambaSizes
from rooftile.models.mixers import MIXERS, NativeSparseSizes
from rooftile.models.mixing_modules import options_of


def kinds_of(mixers: Sequence[Mapping[str, Any]], modules: Sequence[nn.Module]) -> tuple[dict[str, Any], bool]:
    """Returns the fields of a `ModelConfig` that name the mixers and their sizes, and whether the inference decoder has them all.

    It has exact attention without options, and of each other kind layers that are alike.
    """
    names, sizes, served = [], dict[str, Any](), True
    for mixer, module in zip(mixers, modules, strict=True):
        name = mixer["name"]
        names.append(name if name in MIXERS else "attention")
        if names[-1] == "attention":
            served &= name == "attention" and not options_of(mixer)
        else:
            own = _sizes(name, mixer, module)
            served &= sizes.setdefault(name, own) == own
    return {"mixers": tuple(names)} | sizes, served


def _sizes(name: str, mixer: Mapping[str, Any], module: Any) -> Any:
    match name:
        case "native_sparse":
            return NativeSparseSizes(**options_of(mixer))
        case "linear":
            return LinearSizes(feature=module.feature, normalise=module.normalise)
        case "performer":
            return PerformerSizes(m=module.features.m, kind=module.kind)
        case "mamba":
            return MambaSizes(
                width=module.width, rank=module.rank, state=module.state_size, kernel=module.conv1d.kernel_size[0],
                conv_bias=module.conv1d.bias is not None,
            )  # fmt: skip
        case "mamba2":
            return Mamba2Sizes(
                heads=module.heads, head_dim=module.head_dim, groups=module.groups, state=module.state_size,
                kernel=module.conv1d.kernel_size[0], conv_bias=module.conv1d.bias is not None, norm_groups=module.norm.groups,
            )  # fmt: skip
        case _:
            value_dim = module.norm.weight.shape[0]
            keys = (module.conv1d.weight.shape[0] - module.value_heads * value_dim) // 2
            return DeltaSizes(
                key_heads=module.key_heads, value_heads=module.value_heads, key_dim=keys // module.key_heads, value_dim=value_dim,
                kernel=module.conv1d.kernel_size[0], norm_eps=module.norm.eps,
            )  # fmt: skip
