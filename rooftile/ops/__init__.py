"""The operators of attention, which run a backend: dense and packed (`attention`), on a paged cache (`paged`), quantised."""

from rooftile.ops.attention import attend, prepared, remember, signature
from rooftile.ops.paged import attend_paged

__all__ = ["attend", "attend_paged", "prepared", "remember", "signature"]
