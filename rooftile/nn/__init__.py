"""Layers: attention with its projections, recurrences with theirs, and linear layers whose weight is codes.

The layers of approximate methods, of recurrences and of experts stand beside their functions. They are imported when they are
first used, and so are the layers of codes.
"""

from typing import TYPE_CHECKING

from rooftile.nn.attention import Attention
from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.approximate.linear.module import LinearAttention
    from rooftile.approximate.linformer.module import Linformer
    from rooftile.approximate.native_sparse.module import NativeSparse
    from rooftile.approximate.performer.module import Performer
    from rooftile.approximate.reformer.module import Reformer
    from rooftile.approximate.routing.module import Routing
    from rooftile.approximate.sparse_transformer.module import SparseTransformer
    from rooftile.moe.module import DeepSeekMoE
    from rooftile.nn.quantised_linear import QuantisedLinear
    from rooftile.nn.sparse_linear import SparseLinear
    from rooftile.recommend.hstu.layer import HSTU
    from rooftile.recurrent.modules.gated_delta_net import GatedDeltaNet
    from rooftile.recurrent.modules.mamba import Mamba
    from rooftile.recurrent.modules.mamba2 import Mamba2

__all__ = [
    "HSTU",
    "Attention",
    "DeepSeekMoE",
    "GatedDeltaNet",
    "LinearAttention",
    "Linformer",
    "Mamba",
    "Mamba2",
    "NativeSparse",
    "Performer",
    "QuantisedLinear",
    "Reformer",
    "Routing",
    "SparseLinear",
    "SparseTransformer",
]

__getattr__ = late_names(
    "rooftile.nn",
    {
        "HSTU": "rooftile.recommend.hstu.layer",
        "DeepSeekMoE": "rooftile.moe.module",
        "LinearAttention": "rooftile.approximate.linear.module", "Linformer": "rooftile.approximate.linformer.module",
        "NativeSparse": "rooftile.approximate.native_sparse.module", "Performer": "rooftile.approximate.performer.module",
        "Reformer": "rooftile.approximate.reformer.module", "Routing": "rooftile.approximate.routing.module",
        "SparseTransformer": "rooftile.approximate.sparse_transformer.module",
        "GatedDeltaNet": "rooftile.recurrent.modules.gated_delta_net", "Mamba": "rooftile.recurrent.modules.mamba",
        "Mamba2": "rooftile.recurrent.modules.mamba2",
        "QuantisedLinear": "rooftile.nn.quantised_linear", "SparseLinear": "rooftile.nn.sparse_linear",
    },
)  # fmt: skip
