"""Attention that computes less than all pairs, and says what it loses: one file per method.

from rooftile import approximate as ap
o = ap.linear(q, k, v, rooftile.CAUSAL)
"""

from rooftile.approximate.chosen.centroids import commitment_loss, update_centroids
from rooftile.approximate.chosen.compression import compress
from rooftile.approximate.chosen.loki import Loki
from rooftile.approximate.chosen.native_sparse import native_sparse
from rooftile.approximate.chosen.reformer import reformer
from rooftile.approximate.chosen.routing import Members, routing
from rooftile.approximate.chosen.selection import choose_blocks, selected_attention
from rooftile.approximate.chosen.sparse_transformer import sparse_transformer
from rooftile.approximate.features import Features
from rooftile.approximate.gathered.angles import lsh
from rooftile.approximate.linear import linear, linear_step
from rooftile.approximate.linformer import linformer
from rooftile.approximate.loki_layers import LokiLayers
from rooftile.approximate.methods import METHODS, Method
from rooftile.approximate.performer import performer

__all__ = [
    "METHODS",
    "Features",
    "Loki",
    "LokiLayers",
    "Members",
    "Method",
    "choose_blocks",
    "commitment_loss",
    "compress",
    "linear",
    "linear_step",
    "linformer",
    "lsh",
    "native_sparse",
    "performer",
    "reformer",
    "routing",
    "selected_attention",
    "sparse_transformer",
    "update_centroids",
]
