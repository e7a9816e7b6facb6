"""Models of users by their past events: attention over histories of many users.

    from rooftile import recommend
    y = recommend.hstu_attention(q, k, v, cu, alpha=D**-0.5, targets=4)      # q, k and v (total, H, D), cu (B + 1,)
    bias = recommend.RelativeBias(positions, times, recommend.time_edges(buckets))

Inside:

hstu         attention without softmax (generative recommenders)
"""

from typing import TYPE_CHECKING

from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.recommend.hstu.attention import hstu_attention
    from rooftile.recommend.hstu.bias import RelativeBias, time_edges

__all__ = ["RelativeBias", "hstu_attention", "time_edges"]

__getattr__ = late_names(
    "rooftile.recommend",
    {
        "hstu_attention": "rooftile.recommend.hstu.attention", "RelativeBias": "rooftile.recommend.hstu.bias",
        "time_edges": "rooftile.recommend.hstu.bias",
    },
)  # fmt: skip
