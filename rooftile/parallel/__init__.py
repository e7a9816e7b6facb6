"""One sequence on several GPUs: exact attention whose tokens are dealt out to the ranks of a `torch.distributed` group."""

from __future__ import annotations

from rooftile.parallel.attention import context_attention
from rooftile.parallel.context import checkpoint_contexts, context
from rooftile.parallel.estimates import Plan, plan
from rooftile.parallel.sharding import positions, shard, unshard

__all__ = ["Plan", "checkpoint_contexts", "context", "context_attention", "plan", "positions", "shard", "unshard"]
