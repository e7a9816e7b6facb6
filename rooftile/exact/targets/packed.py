"""The calls of packed sequences with targets: the tensors stay where they are, and other offsets say which rows meet.

Three sequences stand in the place of each. In the call of the history they are the history's queries and keys, the targets'
queries without a key, and the targets' keys without a query. In the call of the targets they are keys that no target sees, the
targets over the keys that each of them sees, and the keys of the targets themselves. Only the targets' own rows are copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import FULL, Mask
from rooftile.exact.reference.philox import keep_mask
from rooftile.exact.spec import Call, Options


class Targets(NamedTuple):
    """The call of the targets over the history, B n rows, and what their pairs with themselves need."""

    call: Call
    k: Tensor  # (B n, Hk, D)
    v: Tensor  # (B n, Hk, Dv)
    bias: Tensor | None  # (1|H, B n)
    kept: Tensor | None  # (H, B n): what dropout keeps
    excess: Tensor | None  # (H, B n): how much too small an lse of the call is
    rows: Tensor  # (B n,): each target's row in the pack; the number of rows for one that is not there

    def joined(self, history: tuple[Tensor, Tensor] | None, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns o and lse of all rows."""
        assert history is not None
        (o, lse), total = history, history[0].shape[0]
        # one more row takes the targets that are not there
        o = torch.cat([o, torch.zeros_like(o[:1])]).index_copy(0, self.rows, targets[0])
        lse = torch.cat([lse, torch.zeros_like(lse[:, :1])], dim=1).index_copy(1, self.rows, targets[1])
        return o[:total], lse[:, :total].contiguous()


class _Lengths(NamedTuple):
    """Numbers of each sequence, (B,): its first and last rows, and what of them are targets."""

    n: int
    first_q: Tensor
    last_q: Tensor
    first_k: Tensor
    last_k: Tensor
    targets: Tensor  # n, or 0 in a sequence without queries
    end: Tensor  # the number of keys of its history
    first: Tensor  # the first key of its history that targets see

    def there(self) -> Tensor:
        """Whether a target is there, (B n,): rows of sequences that have fewer come first, and are not."""
        return (self._column() >= self.n - self.targets[:, None]).flatten()

    def before(self, end: Tensor) -> Tensor:
        """The last n places before the ends (B,), as (B n,)."""
        return (end[:, None] - self.n + self._column()).flatten().long()

    def _column(self) -> Tensor:
        return torch.arange(self.n, device=self.targets.device)


def cut(call: Call, mask: Mask) -> tuple[Call, Targets | None]:
    """Returns the call of the history over all rows, in which targets see nothing, and the targets."""
    q, k, v, _, options, settings, _ = call
    if not q.shape[0] or not k.shape[0]:
        return call._replace(mask=mask.over_history), None
    assert options.cu_q is not None
    assert options.cu_k is not None
    at = _lengths(mask, options.cu_q, options.cu_k)
    there = at.there()
    rows, keys = at.before(at.last_q), at.before(at.last_k)
    # zeros for a target that is not there, so that nothing comes from them
    q_own, k_own, v_own = (
        torch.where(there[:, None, None], x.index_select(0, place.clamp(0, x.shape[0] - 1)), 0.0)
        for x, place in ((q, rows), (k, keys), (v, keys))
    )
    bias_targets, bias_own = _bias(options.bias, at, rows)
    seeds, kept, excess = _places(call, at)
    alibi = options.alibi
    alibi = alibi.repeat_interleave(3, dim=0) if alibi is not None and alibi.ndim == 2 and alibi.shape[0] > 1 else alibi
    start = torch.arange(len(at.targets), device=q.device, dtype=rows.dtype) * at.n
    history = call._replace(mask=mask.over_history, options=options._replace(
        alibi=alibi, seed=seeds[0],
        cu_q=_offsets(options.cu_q, at.first_q, at.last_q - at.targets, at.last_q),
        cu_k=_offsets(options.cu_k, at.first_k, at.first_k + at.end, at.first_k + at.end),
    ))  # fmt: skip
    targets = call._replace(q=q_own, mask=FULL, settings=settings._replace(needs_lse=True), options=Options(
        bias=bias_targets, alibi=alibi, seed=seeds[1],
        cu_q=_offsets(options.cu_q.new_full((1,), len(rows)), start, start, start + at.n),
        cu_k=_offsets(options.cu_k, at.first_k, at.first_k + at.first, at.first_k + at.end),
    ))  # fmt: skip
    return history, Targets(targets, k_own, v_own, bias_own, kept, excess, torch.where(there, rows, q.shape[0]))


def _lengths(mask: Mask, cu_q: Tensor, cu_k: Tensor) -> _Lengths:
    queries, keys = cu_q.diff(), cu_k.diff()
    targets = torch.minimum(queries, keys).clamp(max=mask.targets)
    end = keys - targets
    first = mask.over_history.first_key(end).clamp(min=0)
    return _Lengths(
        mask.targets, cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], targets, end,
        # rows that stand for targets that are not there see no key
        torch.where(queries > 0, first, end),
    )  # fmt: skip


def _offsets(cu: Tensor, *borders: Tensor) -> Tensor:
    """The offsets of the sequences that begin at these borders (B,), up to the last of `cu`."""
    return torch.cat([torch.stack(borders, dim=1).flatten().to(cu.dtype), cu[-1:]])


def _bias(bias: Tensor | None, at: _Lengths, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The bias (1|H, 1|total_q, J) of targets over the keys that they see, (1|H, B n, J), and of their own pairs, (1|H, B n)."""
    if bias is None:
        return None, None
    J = bias.shape[2]
    # a broadcast row has place 0
    taken = bias.expand(-1, len(rows), -1) if bias.shape[1] == 1 else bias.index_select(1, rows.clamp(0, bias.shape[1] - 1))
    own = at.before(at.end + at.targets).clamp(0, J - 1)
    keys = at.first.repeat_interleave(at.n)[:, None] + torch.arange(J, device=bias.device)  # (B n, J)
    keys = keys.clamp(max=J - 1).long()
    return (
        taken.gather(2, keys.expand(taken.shape[0], -1, -1)),
        taken.gather(2, own[None, :, None].expand(taken.shape[0], -1, -1))[..., 0],
    )  # fmt: skip


def _places(call: Call, at: _Lengths) -> tuple[tuple[Tensor | None, Tensor | None], Tensor | None, Tensor | None]:
    """The seeds of both calls with the places of their sequences, what dropout keeps of own pairs, and the excess of lse."""
    seed, alibi, q = call.options.seed, call.options.alibi, call.q
    n, H = at.n, q.shape[1]
    b = torch.arange(len(at.targets), device=q.device)
    zero = torch.zeros_like(b)
    if seed is not None:
        queries, keys = at.last_q - at.first_q, at.last_k - at.first_k
        head = torch.arange(H, device=q.device)[:, None]
        kept = keep_mask(seed, call.settings.dropout, b.repeat_interleave(n), head, at.before(queries), at.before(keys))
        # the second of three sequences has the targets, whose first row is at.n before the end
        return (_placed(seed, b, zero, zero), _placed(seed, b, queries - n, at.first)), kept, None
    if alibi is None:
        return (None, None), None, None
    # row c of a call is c places farther from each key than its first, and all targets are at one: the softmax is the same,
    # and lse too small by c times the slope
    seed = _placed(torch.zeros(1, dtype=torch.int64, device=q.device), b, at.end - at.first, zero)
    wide = torch.promote_types(q.dtype, torch.float32)
    slopes = alibi.to(wide).reshape(-1, H).expand(len(b), H).repeat_interleave(n, dim=0)  # (B n, H)
    late = torch.arange(n, device=q.device).repeat(len(b))
    return (None, seed), None, (slopes * late[:, None]).mT


def _placed(seed: Tensor, sequence: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The option `seed` for three sequences in the place of each (see `rooftile.exact.places`)."""
    places = torch.stack([sequence, torch.zeros_like(sequence), query.long(), key.long()], dim=1)  # (B, 4)
    return torch.cat([seed, places.repeat_interleave(3, dim=0).flatten()])
