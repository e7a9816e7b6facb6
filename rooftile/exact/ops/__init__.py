"""The operators of attention, which run a backend: dense and packed (`attention`), on a paged cache (`paged`), quantised."""

from rooftile.exact.ops.attention import RAN, attend, prepared, remember, signature
from rooftile.exact.ops.paged import attend_paged, without_backward
from rooftile.exact.ops.quantised import attend_quantised, quantise_qkv

__all__ = [
    "RAN", "attend", "attend_paged", "attend_quantised", "prepared", "quantise_qkv", "remember", "signature", "without_backward",
]  # fmt: skip
