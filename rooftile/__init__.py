"""Rooftile: exact, hardware-aware attention for PyTorch.

    import rooftile as rt
    o = rt.attention(q, k, v, rt.CAUSAL)    # q (B, T, H, D), k and v (B, S, Hk, D)

`rooftile.explain(q, k, v)` shows which backend would run, and why the others would not.
"""

from typing import TYPE_CHECKING

from rooftile import nn, optim, words
from rooftile.api import (
    attention,
    attention_packed,
    attention_packed_with_lse,
    attention_paged,
    attention_paged_with_lse,
    attention_quantised,
    attention_quantised_with_lse,
    attention_with_lse,
    explain,
    merge,
    quantise_qkv,
)
from rooftile.blocks import Blocks
from rooftile.errors import InvalidInput, Unsupported
from rooftile.integrations import disable, enable, enabled, is_enabled, status
from rooftile.integrations.fusion import fuse, unfuse
from rooftile.integrations.transformers_import import register_when_imported
from rooftile.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window
from rooftile.matmul import QuantisedWeight, quantise_weight
from rooftile.ops.linear import linear
from rooftile.precision import Precision

if TYPE_CHECKING:
    from rooftile.diagnosis.run import diagnose
    from rooftile.serve import LLM, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "CAUSAL",
    "FULL",
    "LLM",
    "Blocks",
    "Chunk",
    "InvalidInput",
    "Mask",
    "Precision",
    "Prefix",
    "QuantisedWeight",
    "SamplingParams",
    "Unsupported",
    "Window",
    "attention",
    "attention_packed",
    "attention_packed_with_lse",
    "attention_paged",
    "attention_paged_with_lse",
    "attention_quantised",
    "attention_quantised_with_lse",
    "attention_with_lse",
    "diagnose",
    "disable",
    "enable",
    "enabled",
    "explain",
    "fuse",
    "is_enabled",
    "linear",
    "merge",
    "nn",
    "optim",
    "quantise_qkv",
    "quantise_weight",
    "status",
    "unfuse",
]

# attn_implementation="rooftile" needs no other call
register_when_imported()


def __getattr__(name: str) -> object:
    """Imports serving and diagnosis when they are used, since their imports are slow; answers names of other libraries."""
    if name in ("LLM", "SamplingParams"):
        from rooftile import serve

        return getattr(serve, name)
    if name == "diagnose":
        from rooftile.diagnosis.run import diagnose

        return diagnose
    if name == "diagnosis":
        import rooftile.diagnosis

        return rooftile.diagnosis
    if name in words.AMERICAN:
        return globals()[words.AMERICAN[name]]
    answer = f": {words.NAMES[name]}" if name in words.NAMES else ""
    raise AttributeError(f"module 'rooftile' has no attribute {name!r}{answer}")


def __dir__() -> list[str]:
    """Returns the public names. The package's modules are found by importing them."""
    return sorted([*__all__, "__version__"])
