"""One sequence on several GPUs: exact attention whose tokens are dealt out to the ranks of a `torch.distributed` group."""

from __future__ import annotations

from rooftile.parallel.attention import context_attention
from rooftile.parallel.sharding import positions, shard, unshard

__all__ = ["context_attention", "positions", "shard", "unshard"]
