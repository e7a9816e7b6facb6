"""Models of users by their past events: attention over histories of many users.

    from rooftile import recommend
    y = recommend.hstu_attention(q, k, v, cu, alpha=D**-0.5, targets=4)      # q, k and v (total, H, D), cu (B + 1,)
    bias = recommend.RelativeBias(positions, times, recommend.time_edges(buckets))
    layer = recommend.HSTU(64, heads=2, positions=256)                       # projection, attention, norm and gate
    model = recommend.HSTURecommender(items)                                 # model.loss(events, cu, times)
    o = recommend.target_attention(candidates, events, cu, top_k=100)        # candidates (B, M, H, D), events (total, H, D)
    scorer = recommend.Scorer(model, room=10**6)                             # of either model: scorer.append(user, events, times)
    scorer.score(user, items)
    clicks = recommend.TargetRecommender(items)                              # clicks.scores(events, cu, candidates)

    from rooftile.recommend import data, metrics
    events = data.read_events("ml-1m").last(200)                             # or data.planted_events(...)
    before, users, due = data.without_last(events)
    metrics.ndcg(scores, due, 10)

Inside:

hstu         attention without softmax (generative recommenders)
target       candidates against a user's history, whole or searched (DIN, SIM, ETA, TWIN)
serving      users' histories in pages, and a scorer over them for both kinds of models
data         users' events from files, and drawn with planted interests
metrics      hit rate, NDCG, and the area under the curve by group
"""

from typing import TYPE_CHECKING

from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.recommend.hstu.attention import hstu_attention
    from rooftile.recommend.hstu.bias import RelativeBias, time_edges
    from rooftile.recommend.hstu.layer import HSTU
    from rooftile.recommend.hstu.model import HSTURecommender
    from rooftile.recommend.hstu.paged.attention import hstu_attention_paged
    from rooftile.recommend.hstu.stochastic_length import stochastic_length
    from rooftile.recommend.serving.scorer import Scorer
    from rooftile.recommend.target.attention import target_attention, target_attention_with_events
    from rooftile.recommend.target.model import TargetRecommender
    from rooftile.recommend.target.search.simhash import simhash, simhash_planes

__all__ = [
    "HSTU", "HSTURecommender", "RelativeBias", "Scorer", "TargetRecommender", "hstu_attention", "hstu_attention_paged", "simhash",
    "simhash_planes", "stochastic_length", "target_attention", "target_attention_with_events", "time_edges",
]  # fmt: skip

__getattr__ = late_names(
    "rooftile.recommend",
    {
        "hstu_attention": "rooftile.recommend.hstu.attention",
        "hstu_attention_paged": "rooftile.recommend.hstu.paged.attention", "RelativeBias": "rooftile.recommend.hstu.bias",
        "Scorer": "rooftile.recommend.serving.scorer",
        "time_edges": "rooftile.recommend.hstu.bias", "HSTU": "rooftile.recommend.hstu.layer",
        "HSTURecommender": "rooftile.recommend.hstu.model", "stochastic_length": "rooftile.recommend.hstu.stochastic_length",
        "target_attention": "rooftile.recommend.target.attention",
        "target_attention_with_events": "rooftile.recommend.target.attention",
        "TargetRecommender": "rooftile.recommend.target.model",
        "simhash": "rooftile.recommend.target.search.simhash", "simhash_planes": "rooftile.recommend.target.search.simhash",
    },
)  # fmt: skip
