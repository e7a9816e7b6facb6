"""Experts: a feed-forward network of which each token uses a few parts. A router chooses them, and their outputs are summed.

router        the record `Router`, which has the options of every family's router
routing       from tokens and centroids to experts and gates
balance       the loss that spreads tokens over experts, and the step of a selection bias
feed_forward  the call `experts`: checks, and the choice between definition and operator
definition    the experts in plain operations, one after the other, each on all tokens
sorting       tokens sorted by expert
products      products of sorted rows with the weight of each row's expert
quantised     experts whose weights are quantised
by_expert     forward and backward on sorted rows
kernels       forward and backward on sorted rows in Triton
activations   what stands between the two products of an expert, and its gradient
problem       the options of an operator, and their code
operator      the operators, with their gradients
module        `DeepSeekMoE`, the layer
"""

from rooftile.moe.balance import balance_loss, update_bias
from rooftile.moe.feed_forward import experts
from rooftile.moe.router import Router
from rooftile.moe.routing import Routing, route

__all__ = ["Router", "Routing", "balance_loss", "experts", "route", "update_bias"]
