"""A recommender of target attention: how likely a user is to click each of some candidates.

Zhou et al., Deep Interest Network, arXiv:1706.06978; Pi et al., Search-based Interest Model, arXiv:2006.05639; Chen et al.,
End-to-End Target Attention, arXiv:2108.04468; Chang et al., TWIN, arXiv:2302.02352.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile.errors import InvalidInput
from rooftile.recommend.hstu.bias import time_edges
from rooftile.recommend.target.attention import BACKENDS, target_attention
from rooftile.recommend.target.problem import WEIGHTS
from rooftile.recommend.target.search.simhash import simhash, simhash_planes
from rooftile.runtime.arguments import check_backend, check_choice, check_count, shown
from rooftile.runtime.tensors import check_offsets
from rooftile.runtime.words import answers_foreign_words

INTEGERS = (torch.int32, torch.int64)
SEARCHES = ("exact", "embedding", "lsh", "category")


class History(NamedTuple):
    """Users' events as candidates read them."""

    keys: Tensor  # (total, H, D)
    values: Tensor  # (total, H, D)
    cu: Tensor  # (B + 1,)
    ages: Tensor | None  # (total,) seconds, if the model has buckets
    search_keys: Tensor | None  # what a search reads in place of keys, see `TargetRecommender.search_keys`


class TargetRecommender(nn.Module):
    """Embeddings of items and categories, attention of candidates to the user's history, and a small network with one output.

    A candidate reads the whole history, its last events, or those that a search finds:

        last=n                              the last n events (DIN)
        search="category", top_k=k          the latest k of the candidate's category (SIM, hard search)
        search="embedding", top_k=k         the k whose embeddings have the largest products with the candidate's (SIM, soft)
        search="lsh", top_k=k               the k whose keys have hashes nearest to the candidate's (ETA)
        search="exact", top_k=k             the k with the largest scores of the attention itself, for each head (TWIN)

    The network reads the candidate's embedding, what the attention found, and the product of both.

    Args:
        items: how many there are; item numbers are 0 to items - 1.
        backend: as in `target_attention`.
        bits: of a hash, for search="lsh" alone; 64 if None.
        buckets: of an event's age, each of which has a learned number that is added to the scores, per head; 0 for a model
            without times.
        categories: (items,) int, the category of each item, numbers from 0; None for a model without categories.
        device, dtype: of the parameters.
        dim: of embeddings.
        heads: of the attention; they divide `dim`.
        hidden: the width of the network.
        last: how many of the last events a candidate may read; None for all.
        search: how the events are found; None reads all.
        top_k: how many events a search finds; users with fewer are read whole.
        weights: of the attention, "softmax", "sigmoid" or "silu".

    Raises:
        InvalidInput: sizes do not match, or a search has not what it needs.

    Example:
        >>> model = TargetRecommender(1000, dim=32, search="exact", top_k=20)
        >>> events, cu = torch.randint(1000, (90,)), torch.tensor([0, 30, 90])
        >>> model(events, cu, torch.randint(1000, (2, 8))).shape
        torch.Size([2, 8])
    """

    @answers_foreign_words
    def __init__(
        self, items: int, *, backend: str | None = None, bits: int | None = None, buckets: int = 0,
        categories: Tensor | None = None, device: torch.device | str | None = None, dim: int = 32,
        dtype: torch.dtype | None = None, heads: int = 2, hidden: int = 64, last: int | None = None, search: str | None = None,
        top_k: int | None = None, weights: str = "softmax",
    ) -> None:  # fmt: skip
        super().__init__()
        self.items, self.dim, self.heads = check_count("items", items), check_count("dim", dim), check_count("heads", heads)
        if self.dim % self.heads:
            raise InvalidInput(f"dim is {dim} and heads is {heads}; heads must divide dim")
        self.last = None if last is None else check_count("last", last)
        self.search = None if search is None else check_choice("search", search, SEARCHES)
        if (search is None) != (top_k is None):
            raise InvalidInput(f"search is {search!r} and top_k is {top_k}; give both, or neither to read the whole history")
        if search == "category" and categories is None:
            raise InvalidInput("search is 'category' and categories is None; give the category of each item")
        if bits is not None and search != "lsh":
            raise InvalidInput(f"bits is {shown(bits)} and search is {search!r}; give search='lsh', or no bits")
        self.top_k = None if top_k is None else check_count("top_k", top_k)
        self.weights, self.backend = check_choice("weights", weights, WEIGHTS), backend
        check_backend(backend, BACKENDS)
        buckets = check_count("buckets", buckets, 0)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(self.items, self.dim, **made)
        self.category_embedding, count = None, 0 if categories is None else _check_categories(categories, self.items)
        if count:
            self.category_embedding = nn.Embedding(count, self.dim, **made)
        for table in (self.embedding, self.category_embedding):
            if table is not None:
                nn.init.normal_(table.weight, std=self.dim**-0.5)
        self.age_table = nn.Parameter(torch.zeros(buckets, self.heads, device=device)) if buckets else None
        self.categories: Tensor | None
        self.edges: Tensor | None
        self.planes: Tensor | None
        self.register_buffer("categories", None if categories is None else categories.long().to(device))
        self.register_buffer("edges", time_edges(buckets).to(device) if buckets else None)
        planes = simhash_planes(self.dim // self.heads, 64 if bits is None else bits, device=device) if search == "lsh" else None
        self.register_buffer("planes", planes)
        self.query, self.key, self.value, self.out = (nn.Linear(self.dim, self.dim, **made) for _ in range(4))
        hidden = check_count("hidden", hidden)
        self.network = nn.Sequential(nn.Linear(3 * self.dim, hidden, **made), nn.SiLU(), nn.Linear(hidden, 1, **made))

    @answers_foreign_words
    def forward(
        self, events: Tensor, cu: Tensor, candidates: Tensor, times: Tensor | None = None, *, now: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Returns the logit of each candidate, (B, M) fp32.

        Args:
            events: item numbers (total,), of users one after the other, oldest first.
            cu: offsets (B + 1,) of users.
            candidates: item numbers (B, M).
            times: seconds (total,) of the events, if the model has buckets.
            now: seconds (B,) at which the candidates are shown; the time of the user's last event if None.

        Raises:
            InvalidInput: an argument is wrong.
        """
        cu = self._check(events, cu, candidates, times, now)
        ages = None if self.age_table is None or times is None else _ages(times, cu, now)
        if self.last is not None:
            events, cu, ages = _last(events, cu, ages, self.last)
        known = self.embedded(events)
        keys, values = self.keys_and_values(known)
        return self.logits(candidates, History(keys, values, cu, ages, self.search_keys(events, known, keys)))

    def loss(
        self, events: Tensor, cu: Tensor, candidates: Tensor, labels: Tensor, times: Tensor | None = None, *,
        now: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the mean binary cross-entropy of candidates (B, M) with labels (B, M) of 0 and 1; the rest as in `forward`."""
        logits = self(events, cu, candidates, times, now=now)
        if not isinstance(labels, Tensor) or labels.shape != candidates.shape or labels.is_complex():
            raise InvalidInput(f"labels is {shown(labels)}; must be of shape {tuple(candidates.shape)}, like candidates")
        if not labels.numel():
            raise InvalidInput(f"candidates is {tuple(candidates.shape)}; there is no candidate to learn from")
        if labels.is_cpu and not torch.compiler.is_compiling() and not bool(((labels >= 0) & (labels <= 1)).all()):
            raise InvalidInput("labels has other values than 0 and 1")
        return F.binary_cross_entropy_with_logits(logits, labels.float())

    @answers_foreign_words
    def scores(
        self, events: Tensor, cu: Tensor, candidates: Tensor, times: Tensor | None = None, *, now: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Returns the probability that each candidate is clicked, (B, M) fp32; arguments as in `forward`."""
        return self(events, cu, candidates, times, now=now).sigmoid()  # type: ignore[no-any-return]

    @property
    def timed(self) -> bool:
        """Whether the model reads times."""
        return self.age_table is not None

    def embedded(self, items: Tensor) -> Tensor:
        """Returns the embeddings (..., dim) of items (...), to which embeddings of categories are added."""
        x: Tensor = self.embedding(items)
        if self.category_embedding is not None and self.categories is not None:
            x = x + self.category_embedding(self.categories[items])
        return x

    def keys_and_values(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values (total, H, D) of events with embeddings (total, dim); they depend on no other event."""
        return self._in_heads(self.key(known)), self._in_heads(self.value(known))

    def search_keys(self, events: Tensor, known: Tensor, keys: Tensor) -> Tensor | None:
        """Returns what the search reads of events (total,) with embeddings (total, dim) and keys (total, H, D).

        Categories (total,), embeddings (total, 1, dim), hashes (total, H, words) int32, or None if it reads the keys themselves.
        """
        if self.search == "category" and self.categories is not None:
            return self.categories[events]
        if self.search == "embedding":
            return known[:, None].detach()
        return simhash(keys, self.planes) if self.planes is not None else None

    def logits(self, candidates: Tensor, history: History, cu_q: Tensor | None = None) -> Tensor:
        """Returns the logits of candidates (B, M), or (total_q,) with offsets cu_q (B + 1,), in that shape, fp32."""
        asked, bias = self.embedded(candidates), None
        if history.ages is not None and self.age_table is not None and self.edges is not None:
            bias = self.age_table[torch.bucketize(history.ages, self.edges, right=True)]  # (total, heads)
        q = self._in_heads(self.query(asked))
        found = target_attention(
            q, history.keys, history.cu, values=history.values, bias=bias, cu_q=cu_q, weights=self.weights, backend=self.backend,
            top_k=self.top_k, **self._search(candidates, asked, q, history),
        )  # fmt: skip
        read = self.out(found.flatten(-2))
        return self.network(torch.cat([asked, read, asked * read], dim=-1))[..., 0].float()

    def _in_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def _search(self, candidates: Tensor, asked: Tensor, q: Tensor, history: History) -> dict[str, Any]:
        """The arguments of the attention that say how events are found."""
        if self.search is None:
            return {}
        if self.search == "category" and self.categories is not None:
            return {"search": "category", "q_categories": self.categories[candidates], "key_categories": history.search_keys}
        if self.search == "embedding":
            features = {"search_q": asked.unsqueeze(-2).detach(), "search_keys": history.search_keys}
            return {"search": "exact", "short": "all", "per_head": False, **features}
        if self.planes is not None:
            return {"search": "lsh", "short": "all", "search_q": simhash(q, self.planes), "search_keys": history.search_keys}
        return {"search": "exact", "short": "all"}

    def _check(self, events: Tensor, cu: Tensor, candidates: Tensor, times: Tensor | None, now: Tensor | None) -> Tensor:
        """Returns the offsets on the device of the events."""
        for name, x, ndim, due in (("events", events, 1, "(total,)"), ("candidates", candidates, 2, "(B, M)")):
            if not isinstance(x, Tensor) or x.ndim != ndim or x.dtype not in INTEGERS:
                raise InvalidInput(f"{name} is {shown(x)}; must be int64 {due}, the numbers of items")
            # on a GPU PyTorch's embeddings stop the program at a number that they do not have
            readable = x.is_cpu and x.numel() > 0 and not torch.compiler.is_compiling()
            if readable and not 0 <= int(x.min()) <= int(x.max()) < self.items:
                worst = int(x.min()) if int(x.min()) < 0 else int(x.max())
                raise InvalidInput(f"{name} has the item {worst}; items are 0 to {self.items - 1}")
        cu = check_offsets("cu", cu, events.shape[0], "events", events.device, False)
        users = cu.shape[0] - 1
        if candidates.shape[0] != users:
            raise InvalidInput(f"candidates has {candidates.shape[0]} users; cu has {users}")
        for name, seconds, count in (("times", times, events.shape[0]), ("now", now, users)):
            if seconds is not None and self.age_table is None:
                raise InvalidInput(f"{name} came, and the model has no buckets of ages; give it buckets, or leave {name} out")
            if seconds is None:
                continue
            number = isinstance(seconds, Tensor) and (seconds.dtype in INTEGERS or seconds.is_floating_point())
            if not number or seconds.shape != (count,):
                raise InvalidInput(f"{name} is {shown(seconds)}; must be seconds ({count},)")
            if seconds.is_cpu and not torch.compiler.is_compiling() and bool(seconds.isnan().any()):
                raise InvalidInput(f"{name} has NaN; must be seconds ({count},)")
        if self.age_table is not None and times is None:
            raise InvalidInput(f"times is None; the model has buckets of ages, and needs seconds ({events.shape[0]},)")
        return cu


def _check_categories(categories: Tensor, items: int) -> int:
    """Returns how many categories there are."""
    if not isinstance(categories, Tensor) or categories.shape != (items,) or categories.dtype not in INTEGERS:
        raise InvalidInput(f"categories is {shown(categories)}; must be int64 ({items},), the category of each item")
    if int(categories.min()) < 0:
        raise InvalidInput(f"categories has {int(categories.min())}; must be numbers from 0")
    return int(categories.max()) + 1


def _ages(times: Tensor, cu: Tensor, now: Tensor | None) -> Tensor:
    """Seconds from each event to now, (total,)."""
    lengths = cu.diff()
    if now is None:
        # a user without events has no last one, and no row that would read it
        now = times[(cu[1:] - 1).clamp(min=0)] if times.shape[0] else times.new_zeros(lengths.shape[0])
    return torch.repeat_interleave(now, lengths, output_size=times.shape[0]) - times


def _last(events: Tensor, cu: Tensor, ages: Tensor | None, longest: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The last events of each user, at most `longest`."""
    lengths = cu.diff()
    ends = torch.repeat_interleave(cu[1:], lengths, output_size=events.shape[0])
    keep = ends - torch.arange(events.shape[0], device=events.device) <= longest
    cu = torch.cat([cu.new_zeros(1), lengths.clamp(max=longest).cumsum(0)])
    return events[keep], cu, None if ages is None else ages[keep]
