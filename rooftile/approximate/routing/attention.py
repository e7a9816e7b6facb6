"""Routing Transformer: attention within clusters of tokens around learned centroids.

Each centroid takes the tokens that score highest with it. On a GPU kernels load the rows of clusters where they lie
(`rooftile.approximate.gathered`); elsewhere the clusters are the batch of one call of the exact kernels. Causal order within a
cluster is the order of the tokens' places. With `strict`, every token goes to one cluster, and the clusters are packed
sequences, however uneven.

Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.approximate import gathered
from rooftile.approximate.arguments import check_qkv, check_scale
from rooftile.approximate.chosen_arguments import as_given, check_indices, check_mask, check_range, check_way, in_kernels
from rooftile.approximate.gathered.pairs import add_rows, attend, cleaned, take, take_flags
from rooftile.approximate.routing import definition
from rooftile.approximate.routing.definition import normed
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import api
from rooftile.exact.masks import CAUSAL, FULL, Mask
from rooftile.fused.norms import layer_norm
from rooftile.recurrent.split.context import follows_context
from rooftile.runtime.arguments import check_count, check_flag, shown
from rooftile.runtime.operators import mapped, transformed
from rooftile.runtime.words import answers_foreign_words


class Members(NamedTuple):
    """The tokens of each cluster: places of queries (B, H, c, w) and of keys (B, H, c, w'), int32, rising."""

    queries: Tensor
    keys: Tensor


@follows_context()
@answers_foreign_words
def routing(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    centroids: Tensor,  # (H, c, D)
    mask: Mask | None = FULL,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
    members: Members | Tensor | None = None,
    scale: float | None = None,
    strict: bool = False,
    width: int | None = None,
) -> tuple[Tensor, Members | Tensor]:
    """Attention within clusters: each centroid takes its `width` best queries and its `width` best keys.

    Queries and keys are layer-normed without scale and shift first. A token that several clusters took gets the mean of their
    outputs, one that none took gets 0. Causal attention goes by the tokens' places in the text.

    A centroid takes the best tokens of the whole text, so a later token can push an earlier one out: this is value-causal only.
    `strict` sends each token to its nearest centroid, by the sum of its query's and its key's score: a rule of this library,
    not of the paper. No later token has an effect, and one can decode. It needs as many queries as keys, or ready-made members.

    Args:
        q: queries (B, T, H, D), float32, bfloat16 or float16, any strides.
        k: keys (B, S, Hk, D). Hk divides H.
        v: values (B, S, Hk, Dv).
        centroids: (H, c, D), in fp32; no gradient flows to them (`update_centroids`, `commitment_loss`).
        mask: FULL or CAUSAL, aligned bottom-right when T != S.
        backend: "eager" is the definition; "triton" the kernels that load rows by the members, which None and "auto" take where
            they run; another name means the exact kernels (`rooftile.attention`), on copied clusters. With strict all names
            mean the exact kernels.
        deterministic: as in `rooftile.attention`.
        members: ready-made, from an earlier call: `Members`; with strict the cluster of each token, (B, S, H) int32.
        scale: of the scores; 1 / sqrt(D) if None.
        strict: see above.
        width: tokens per cluster; S / c, rounded up, if None.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q; and the members, which are constants in the backward.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend does not run this problem.

    One centroid whose width is the whole text gives exact attention of the normed queries and keys, causal too; so do c equal
    centroids. These are known answers of the tests.

    Example:
        >>> q, k, v = (torch.randn(1, 256, 8, 64) for _ in range(3))
        >>> o, members = routing(q, k, v, torch.randn(8, 16, 64), CAUSAL)
        >>> members.queries.shape
        torch.Size([1, 8, 16, 16])

    Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997.
    """
    q, k, v, _ = check_qkv(q, k, v)
    centroids = check_centroids(centroids, q)
    causal, strict = check_mask("routing", mask), check_flag("strict", strict)
    options = check_way(backend, deterministic, check_scale(scale, q.shape[-1]))
    own: dict[str, Any] = {"causal": causal, "scale": check_scale(scale, q.shape[-1])}
    with as_given(q):
        if strict:
            if width is not None:
                raise InvalidInput(f"width is {shown(width)} with strict; every token goes to one cluster: leave it out")
            clusters = nearest(q, k, centroids) if members is None else check_clusters(members, q, k, centroids)
            if options is None:
                return definition.routing_strict(q, k, v, clusters, **own).contiguous(), clusters
            return _in_clusters(normed(q), normed(k), v, clusters, centroids.shape[1], causal, options), clusters
        members = choose_members(q, k, centroids, width) if members is None else check_members(members, q, k, centroids)
        if options is None:
            return definition.routing(q, k, v, *members, **own).contiguous(), members
        if in_kernels("routing", options, gathered.refusal(q, v), q):
            # 16k rows of 16 heads take PyTorch's own kernel 290 us, where the bytes of its rows take 32
            w = torch.ones(q.shape[-1], dtype=q.dtype, device=q.device)
            q, k = (layer_norm(x, w, torch.zeros_like(w), 1e-5) for x in (q, k))
            return gathered.attend(q, k, v, gathered.from_members(*members, causal), scale=own["scale"]), members
        return _between_members(normed(q), normed(k), v, members, causal, options), members


def choose_members(q: Tensor, k: Tensor, centroids: Tensor, width: int | None) -> Members:
    """The `width` best queries and keys of each centroid, scored in fp32; ties go to the lower place."""
    S, c = k.shape[1], centroids.shape[1]
    width = max(-(-S // c), 1) if width is None else check_count("width", width)
    with torch.no_grad():
        return Members(*(_best(x, centroids, min(width, x.shape[1])) for x in (q, k)))


def _best(x: Tensor, centroids: Tensor, width: int) -> Tensor:
    found = gathered.best_members(x, centroids, width) if gathered.can_choose(x) else None
    if found is None:
        found = definition.taken(x.repeat_interleave(centroids.shape[0] // x.shape[2], dim=2), centroids, width).int()
    return found


def nearest(q: Tensor, k: Tensor, centroids: Tensor) -> Tensor:
    """The cluster of each token, (B, T, H) int32."""
    if q.shape[1] != k.shape[1]:
        raise InvalidInput(f"k has length {k.shape[1]}; q has {q.shape[1]}, and with strict they must agree, or pass members=")
    with torch.no_grad():
        return definition.nearest(q, k.repeat_interleave(q.shape[2] // k.shape[2], dim=2), centroids).int()


def _between_members(q: Tensor, k: Tensor, v: Tensor, members: Members, causal: bool, options: dict[str, Any]) -> Tensor:
    """The clusters as the batch of one call, and the mean of a token's clusters."""
    (B, T, H, _), S = q.shape, k.shape[1]
    queries, keys = (x.long() for x in members)  # (B, H, c, w)
    c, w = queries.shape[2:]
    (q, lost_q), (k, lost_k), (v, lost_v) = cleaned(q), cleaned(k), cleaned(v)
    lost_q, lost_k = take_flags(lost_q, queries).flatten(0, 2)[..., None], take_flags(lost_k | lost_v, keys).flatten(0, 2)
    q, k, v = (take(x, y).flatten(0, 2).unsqueeze(2) for x, y in ((q, queries), (k, keys), (v, keys)))  # (B H c, w, 1, D)
    seen = queries.new_ones(B, H, c, w, keys.shape[3], dtype=torch.bool)
    if causal:
        seen = keys[..., None, :] <= queries[..., :, None] + (S - T)
    o, _ = attend(q, k, v, seen.flatten(0, 2), lost_q, lost_k, **options)
    wide = o.to(torch.promote_types(o.dtype, torch.float32)).view(B, H, c, w, o.shape[-1])
    total = add_rows(wide, queries, T)  # (B, T, H, Dv)
    count = add_rows(torch.ones_like(wide[..., :1]), queries, T)
    return (total / count.clamp(min=1)).to(o.dtype)


def _in_clusters(
    q: Tensor, k: Tensor, v: Tensor, clusters: Tensor, c: int, causal: bool, options: dict[str, Any]
) -> Tensor:  # fmt: skip
    """The clusters as packed sequences. The queries are the last tokens of the text, and so of each cluster."""
    if transformed() and mapped(clusters):
        raise Unsupported(
            "routing with strict under torch.vmap: each sample has clusters of other lengths; write the mapped axis as the "
            "batch's, or backend='eager'"
        )
    B, T, H, _ = q.shape
    S = k.shape[1]
    own = clusters.transpose(1, 2).long()  # (B, H, S)
    places, cu = [], []
    for x in (own[..., S - T :], own):
        places.append(gathered.sorted_rows(x)[1])
        counts = x.new_zeros(B, H, c).scatter_add(-1, x, torch.ones_like(x))
        cu.append(torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0)).int())
    q, k, v = (take(x, y).flatten(0, 2).unsqueeze(1) for x, y in ((q, places[0]), (k, places[1]), (v, places[1])))
    o = api.attention_packed(q, k, v, cu[0], cu[1], CAUSAL if causal else FULL, **options)  # (B H T, 1, Dv)
    ranks = torch.arange(T, device=q.device).expand_as(places[0])
    back = torch.zeros_like(places[0]).scatter(-1, places[0], ranks)
    return take(o.view(B, H, T, o.shape[-1]).transpose(1, 2), back).transpose(1, 2).contiguous()


def check_centroids(centroids: Any, q: Tensor) -> Tensor:
    """The centroids in fp32, or fp64 for fp64 queries, without their gradient."""
    H, D = q.shape[-2:]
    if not isinstance(centroids, Tensor) or not centroids.is_floating_point() or centroids.ndim != 3:
        raise InvalidInput(f"centroids is {shown(centroids)}; must be a floating-point tensor (H, c, D)")
    if centroids.shape[0] != H or centroids.shape[2] != D or centroids.shape[1] == 0:
        raise InvalidInput(f"centroids is {tuple(centroids.shape)}; must be (H, c, D) = ({H}, c, {D}), like the heads of q")
    if centroids.device != q.device:
        raise InvalidInput(f"centroids is on {centroids.device}; q is on {q.device}, and all inputs must be on one device")
    return centroids.detach().to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def check_members(members: Any, q: Tensor, k: Tensor, centroids: Tensor) -> Members:
    B, _, H, _ = q.shape
    c = centroids.shape[1]
    if not isinstance(members, (tuple, list)) or len(members) != 2:
        raise InvalidInput(f"members is {shown(members)}; must be the Members (queries, keys) that routing returns")
    for name, x, length in zip(("queries", "keys"), members, (q.shape[1], k.shape[1]), strict=True):
        check_indices(f"members.{name}", x, (B, H, c, None), f"(B, H, c, width) = ({B}, {H}, {c}, width)", q)
        check_range(f"members.{name}", x, length)
    return Members(*members)


def check_clusters(members: Any, q: Tensor, k: Tensor, centroids: Tensor) -> Tensor:
    B, _, H, _ = q.shape
    S = k.shape[1]
    clusters = check_indices("members", members, (B, S, H), f"(B, S, H) = ({B}, {S}, {H}), the cluster of each token", q)
    check_range("members", clusters, centroids.shape[1])
    if q.shape[1] > S:
        raise InvalidInput(f"q has length {q.shape[1]}; k has {S}, and with strict queries are the last tokens of the keys")
    return clusters
