"""Reformer: tokens sorted by hash attend to their chunk and the one before, in several rounds that are joined by lse.

On a GPU one launch runs the chunks of all rounds, by kernels that load rows where they lie and compute which pairs are seen
(`rooftile.approximate.gathered`). Elsewhere the chunks of a round are the batch of one call of the exact kernels, with a chunk
and its predecessor as keys. The tables of pairs are (chunk x 2 chunk) per chunk, so memory grows with T. The rounds run one after
the other.

Kitaev et al., Reformer, arXiv:2001.04451.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate import gathered
from rooftile.approximate.arguments import check_qkv, check_scale
from rooftile.approximate.chosen_arguments import as_given, check_indices, check_mask, check_way, in_kernels
from rooftile.approximate.gathered.pairs import attend, cleaned, take, take_flags
from rooftile.approximate.reformer import definition
from rooftile.approximate.reformer.angles import lsh
from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.exact.masks import FULL, Mask
from rooftile.fused.norms import rms_norm
from rooftile.recurrent.split.context import follows_context
from rooftile.runtime.arguments import check_choice, check_count, check_flag, shown
from rooftile.runtime.words import answers_foreign_words


@follows_context()
@answers_foreign_words
def reformer(
    qk: Tensor,  # (B, T, H, D)
    v: Tensor,  # (B, T, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    backend: str | None = None,
    buckets: int | None = None,
    chunk: int = 64,
    deterministic: bool | None = None,
    duplicates: str = "once",
    hashes: Tensor | None = None,
    rounds: int = 4,
    scale: float | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Tensor:
    """Attention to tokens that hash alike: each round sorts by (hash, place), and a token sees its chunk and the one before.

    One projection gives queries and keys; keys are divided by their lengths: by sqrt(|k|^2 + 1e-6 D), whose small term is as in
    the code that trained the paper's models, and keeps a key of zeros zero. A round's first chunk sees its last one. A token sees
    itself only if it sees nothing else, in any round.

    Causal attention hides later tokens by their places, so no value leaks. Yet the order of the sort depends on later queries:
    it is value-causal only. `strict` sees the last `chunk` earlier tokens of the bucket in place of chunks, and no later token
    has an effect; with `buckets` given, a text's rows do not depend on what follows, and it can be decoded.

    Args:
        qk: queries and keys (B, T, H, D), float32, bfloat16 or float16, any strides.
        v: values (B, T, Hk, Dv). Hk divides H.
        mask: FULL or CAUSAL.
        backend: "eager" is the definition; "triton" the kernels that load rows by the sorted places, which None and "auto" take
            where they run; another name means the exact kernels (`rooftile.attention`), on copied chunks.
        buckets: values of a hash, an even number; the largest power of two up to 2 T / chunk if None.
        chunk: tokens per chunk.
        deterministic: as in `rooftile.attention`.
        duplicates: "once" divides a pair's weight by the number of rounds that see it, so that it counts once, as the paper does;
            "counted" does not, as packages do.
        hashes: ready-made, (B, T, H, rounds) int32, from `lsh`; rounds, buckets and seed are then not used.
        rounds: how often to hash.
        scale: of the scores; 1 if None, as in the code that trained the paper's models. The paper's text, and some packages, have
            1 / sqrt(D).
        seed: of the hashes.
        strict: see above; needs CAUSAL.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of qk.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend does not run this problem.

    Where all tokens are within two chunks, or in one bucket of `strict` with chunk >= T, "once" is attention to all other tokens
    with any number of rounds, and "counted" with equal hashes too: known answers of the tests.

    Example:
        >>> qk, v = torch.randn(1, 256, 8, 64), torch.randn(1, 256, 8, 64)
        >>> reformer(qk, v, CAUSAL, rounds=2, chunk=32).shape
        torch.Size([1, 256, 8, 64])

    Kitaev et al., Reformer, arXiv:2001.04451.
    """
    qk, v = _check_tensors(qk, v)
    causal, strict = check_mask("reformer", mask), check_flag("strict", strict)
    if strict and not causal:
        raise InvalidInput("strict is True and mask is full; strict sees earlier tokens only: pass mask=rooftile.CAUSAL")
    chunk = check_count("chunk", chunk)
    duplicates = check_choice("duplicates", duplicates, ("once", "counted"))
    scale = 1.0 if scale is None else check_scale(scale, qk.shape[-1])
    options = check_way(backend, deterministic, scale)
    B, T, H, _ = qk.shape
    # Hashes that a caller gives may be any integers; hashes of `lsh` are below the number of buckets.
    below = None
    if hashes is None:
        buckets = usual_buckets(T, chunk) if buckets is None else buckets
        hashes, below = lsh(qk, rounds, buckets, seed), int(buckets)
    hashes = check_indices("hashes", hashes, (B, T, H, None), f"(B, T, H, rounds) = ({B}, {T}, {H}, rounds)", qk)
    if hashes.shape[-1] == 0:
        raise InvalidInput("hashes has no round; must have at least 1")
    with as_given(qk):
        if options is None:
            words: dict[str, Any] = {"causal": causal, "chunk": chunk, "duplicates": duplicates, "strict": strict, "scale": scale}
            return definition.reformer(qk, v, hashes, **words).contiguous()
        if T == 0:
            # nothing, with gradients
            return v.repeat_interleave(H // v.shape[2], dim=2) + qk.sum()
        once = duplicates == "once"
        reason = gathered.refusal(qk, v, hashes.shape[-1] if once else 1)
        if in_kernels("reformer", options, reason, qk):
            return _gathered(qk, v, gathered.from_hashes(hashes, chunk, causal, strict, once, below), scale)
        sort = _Sort(hashes, chunk, causal, strict)
        (q, lost_q), (values, lost_v) = cleaned(qk), cleaned(v)
        lost = lost_q, lost_q | lost_v.repeat_interleave(H // v.shape[2], dim=2)
        k = unit(q)
        o, lse = api.merge([_round(r, q, k, values, lost, sort, once, options) for r in range(hashes.shape[-1])])
        own = v.repeat_interleave(H // v.shape[2], dim=2)
        return torch.where((lse == -math.inf).mT[..., None], own, o).contiguous()


def usual_buckets(T: int, chunk: int) -> int:
    """The largest power of two up to 2 T / chunk, and at least 2."""
    return int(2 ** max((2 * T // chunk).bit_length() - 1, 1))


def unit(x: Tensor) -> Tensor:
    """Vectors of length one but for the small term of the definition, computed in fp32."""
    return definition.unit(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


def _gathered(qk: Tensor, v: Tensor, lists: gathered.RowLists, scale: float) -> Tensor:
    """All rounds at once. Unit keys equal keys of length sqrt(D) with a smaller scale, and an RMS norm is one kernel."""
    k = rms_norm(qk, torch.ones(qk.shape[-1], dtype=qk.dtype, device=qk.device), 1e-6)
    return gathered.attend(qk, k, v, lists, scale=scale * qk.shape[-1] ** -0.5)


class _Sort:
    """The order of every round, and which pairs it lets see each other."""

    def __init__(self, hashes: Tensor, chunk: int, causal: bool, strict: bool) -> None:
        self.hash = hashes.permute(3, 0, 2, 1).long().contiguous()  # (R, B, H, T)
        self.T, self.chunk, self.causal, self.strict = self.hash.shape[-1], chunk, causal, strict
        self.chunks = -(-self.T // chunk)
        self.order = self.hash.sort(dim=-1, stable=True).indices  # (R, B, H, T): places by rank
        self.rank = self.order.sort(dim=-1).indices  # (R, B, H, T): ranks by place

    def places(self, r: int) -> Tensor:
        """The places (B, H, C, m) of a round's chunks; T past the end."""
        pad = self.chunks * self.chunk - self.T
        return torch.nn.functional.pad(self.order[r], (0, pad), value=self.T).unflatten(-1, (-1, self.chunk))

    def with_previous(self, x: Tensor) -> Tensor:
        """The keys of each chunk (B, H, C, m, ...): the keys of the chunk before, and its own. A single chunk has no other."""
        return x if self.chunks == 1 else torch.cat([x.roll(1, dims=2), x], dim=3)

    def sees(self, r: int, i: Tensor, j: Tensor) -> Tensor:
        """Whether round r shows places j (B, H, C, n) to places i (B, H, C, m): (B, H, C, m, n)."""
        rank_i, rank_j = self._at(self.rank[r], i), self._at(self.rank[r], j)
        if self.strict:
            back = rank_i[..., :, None] - rank_j[..., None, :]
            same = self._at(self.hash[r], i)[..., :, None] == self._at(self.hash[r], j)[..., None, :]
            return same & (back >= 1) & (back <= self.chunk)
        chunk_i, chunk_j = rank_i // self.chunk, rank_j // self.chunk
        return (chunk_i[..., :, None] - chunk_j[..., None, :]) % self.chunks <= 1

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether a pair may be seen in any round: another token, within the text, and not a later one."""
        i, j = i[..., :, None], j[..., None, :]
        return (j < i if self.causal else j != i) & (i < self.T) & (j < self.T)

    def _at(self, x: Tensor, places: Tensor) -> Tensor:
        """x (B, H, T) at places (B, H, C, m); places past the end read the last token."""
        return x.gather(-1, places.clamp(max=self.T - 1).flatten(2)).unflatten(-1, places.shape[2:])


def _round(
    r: int, q: Tensor, k: Tensor, v: Tensor, lost: tuple[Tensor, Tensor], sort: _Sort, once: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """One round's o (B, T, H, Dv) and lse (B, H, T)."""
    B, T, H, _ = q.shape
    i = sort.places(r)  # (B, H, C, m)
    j = sort.with_previous(i)
    allowed = sort.allowed(i, j)
    seen = allowed & sort.sees(r, i, j)  # (B, H, C, m, n)
    bias = None
    if once and sort.hash.shape[0] > 1:
        counts = torch.zeros_like(seen, dtype=torch.promote_types(q.dtype, torch.float32))
        for other in range(sort.hash.shape[0]):
            counts += sort.sees(other, i, j)
        bias = -counts.clamp(min=1).log().flatten(0, 2)
    rows = i.clamp(max=T - 1)
    queries, keys, values = take(q, rows), sort.with_previous(take(k, rows)), sort.with_previous(take(v, rows))
    queries, keys, values = (x.flatten(0, 2).unsqueeze(2) for x in (queries, keys, values))  # (B H C, m or n, 1, D)
    lost_q, lost_k = take_flags(lost[0], rows), sort.with_previous(take_flags(lost[1], rows))
    lost_q, lost_k = lost_q.flatten(0, 2)[..., None], lost_k.flatten(0, 2)
    o, lse = attend(queries, keys, values, seen.flatten(0, 2), lost_q, lost_k, bias=bias, **options)
    back = sort.rank[r]
    o = o.reshape(B, H, sort.chunks * sort.chunk, o.shape[-1]).gather(2, back[..., None].expand(-1, -1, -1, o.shape[-1]))
    return o.transpose(1, 2), lse.reshape(B, H, sort.chunks * sort.chunk).gather(2, back)


def _check_tensors(qk: Any, v: Any) -> tuple[Tensor, Tensor]:
    for name, x in (("qk", qk), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise InvalidInput(f"{name} is {shown(x)}; must be a tensor (B, T, H, D)")
    if v.shape[:2] != qk.shape[:2] or v.shape[2] < 1 or qk.shape[2] % v.shape[2]:
        raise InvalidInput(f"v is {tuple(v.shape)}; qk is {tuple(qk.shape)}: lengths must agree, and v's heads divide qk's")
    qk, _, v, _ = check_qkv(qk, qk[:, :, : v.shape[2]], v)
    return qk, v
