"""Long sequences: exact attention over tokens that the ranks of a `torch.distributed` group hold, and less memory on each rank.

`tiled` and `offload` need no group: a feed-forward in tiles of tokens, and activations in the host's memory.
"""

from __future__ import annotations

from rooftile.parallel.attention import context_attention
from rooftile.parallel.context import checkpoint_contexts, context
from rooftile.parallel.estimates import Plan, plan
from rooftile.parallel.offload import offload
from rooftile.parallel.sharding import positions, shard, unshard
from rooftile.parallel.tiles import tiled

__all__ = [
    "Plan", "checkpoint_contexts", "context", "context_attention", "offload", "plan", "positions", "shard", "tiled", "unshard",
]  # fmt: skip
