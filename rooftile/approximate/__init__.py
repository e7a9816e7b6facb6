"""Attention that computes less than all pairs, and says what it loses: one file per method.

from rooftile import approximate as ap
o = ap.linear(q, k, v, rooftile.CAUSAL)
"""

from rooftile.approximate.linear.attention import linear, linear_step, linear_with_state
from rooftile.approximate.linformer.attention import linformer
from rooftile.approximate.loki.attention import Loki
from rooftile.approximate.loki.layers import LokiLayers
from rooftile.approximate.methods import METHODS, Method
from rooftile.approximate.native_sparse.attention import native_sparse
from rooftile.approximate.native_sparse.compression import compress
from rooftile.approximate.native_sparse.selection import choose_blocks, choose_blocks_with_scores, selected_attention
from rooftile.approximate.performer.attention import performer, performer_step, performer_with_state
from rooftile.approximate.performer.features import Features
from rooftile.approximate.reformer.angles import lsh
from rooftile.approximate.reformer.attention import reformer
from rooftile.approximate.routing.attention import Members, routing
from rooftile.approximate.routing.centroids import commitment_loss, update_centroids
from rooftile.approximate.sparse_transformer.attention import sparse_transformer

__all__ = [
    "METHODS",
    "Features",
    "Loki",
    "LokiLayers",
    "Members",
    "Method",
    "choose_blocks",
    "choose_blocks_with_scores",
    "commitment_loss",
    "compress",
    "linear",
    "linear_step",
    "linear_with_state",
    "linformer",
    "lsh",
    "native_sparse",
    "performer",
    "performer_step",
    "performer_with_state",
    "reformer",
    "routing",
    "selected_attention",
    "sparse_transformer",
    "update_centroids",
]
