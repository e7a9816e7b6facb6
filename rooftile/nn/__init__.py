"""Attention as modules. Those of approximate methods are imported when they are used, as their functions are."""

from importlib import import_module
from typing import TYPE_CHECKING

from rooftile.nn.attention import Attention

if TYPE_CHECKING:
    from rooftile.nn.chosen import Reformer, Routing, SparseTransformer
    from rooftile.nn.low_rank import LinearAttention, Linformer, Performer
    from rooftile.nn.native_sparse import NativeSparse

__all__ = [
    "Attention",
    "LinearAttention",
    "Linformer",
    "NativeSparse",
    "Performer",
    "Reformer",
    "Routing",
    "SparseTransformer",
]

# the file of each module that is imported when it is used
_LATER = {
    "LinearAttention": "low_rank",
    "Linformer": "low_rank",
    "NativeSparse": "native_sparse",
    "Performer": "low_rank",
    "Reformer": "chosen",
    "Routing": "chosen",
    "SparseTransformer": "chosen",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(f"rooftile.nn.{_LATER[name]}"), name)
    raise AttributeError(f"module 'rooftile.nn' has no attribute {name!r}")
