"""Attention that computes less than all pairs, and says what it loses: one file per method.

    from rooftile import approximate as ap
    o = ap.linear(q, k, v, rooftile.CAUSAL)
"""

from rooftile.approximate.chosen.loki import Loki
from rooftile.approximate.chosen.reformer import lsh, reformer
from rooftile.approximate.chosen.routing import Members, commitment_loss, routing, update_centroids
from rooftile.approximate.chosen.sparse_transformer import sparse_transformer
from rooftile.approximate.features import Features
from rooftile.approximate.linear import linear, linear_step
from rooftile.approximate.linformer import linformer
from rooftile.approximate.methods import METHODS, Method
from rooftile.approximate.performer import performer

__all__ = [
    "METHODS",
    "Features",
    "Loki",
    "Members",
    "Method",
    "commitment_loss",
    "linear",
    "linear_step",
    "linformer",
    "lsh",
    "performer",
    "reformer",
    "routing",
    "sparse_transformer",
    "update_centroids",
]
