"""Sends states along the ranks: to the ranks behind in a forward, to the ranks before in a backward, and to all at the end.

One all-to-all moves what is needed and nothing else: a rank's message goes to the ranks that its sequence reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.recurrent.rule import wide_dtype
from rooftile.recurrent.split.part import Part

# the map of a rank's tokens and the state (or its gradient) that they give; no map where the sequence begins on the rank
Message = tuple[Tensor | None, Tensor]


def exchange(
    part: Part, message: Message | None, shapes: tuple[tuple[int, ...], tuple[int, ...]], like: Tensor, step: int
) -> list[Message]:  # fmt: skip
    """Returns the messages that reach this rank, the farthest first; all but the first have a map.

    Args:
        part: this rank's part; every rank of the group calls this, or none.
        message: this rank's own; None where no rank waits for it.
        shapes: of a map and of a state.
        like: a tensor with the dtype and the device of the messages.
        step: 1 for states, which go to the ranks behind; -1 for gradients, which go to the ranks before.
    """
    rank, ranks = part.ranks.rank, part.ranks.count
    coming = part.senders(rank, step)
    goes_to = [peer for peer in range(ranks) if rank in part.senders(peer, step)]
    parts = [] if message is None else [x.to(like.dtype).reshape(-1) for x in message if x is not None]
    sent = torch.cat(parts) if parts else like.new_empty(0)
    maps = [prod(shapes[0]) if share.spans else 0 for share in part.shares]
    sizes = [maps[peer] + prod(shapes[1]) if peer in coming else 0 for peer in range(ranks)]
    out = [sent.numel() if peer in goes_to else 0 for peer in range(ranks)]
    got = like.new_empty(sum(sizes))
    dist.all_to_all_single(got, sent.repeat(len(goes_to)), sizes, out, group=part.ranks.group)
    pieces = got.split(sizes)
    found: list[Message] = []
    for peer in coming:
        map, state = pieces[peer].split((maps[peer], prod(shapes[1])))
        found.append((map.view(shapes[0]) if part.shares[peer].spans else None, state.view(shapes[1])))
    return found


def folded(messages: list[Message], join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Returns the state at this rank's border: the farthest one, taken through the maps of the ranks between."""
    (_, found), *others = messages
    for map, own in others:
        assert map is not None
        found = join(map, found, own)
    return found


def is_needed(part: Part) -> bool:
    """Whether any sequence crosses a border, which every rank knows."""
    return any(share.leaves for share in part.shares)


def everywhere(part: Part, last: Tensor, first: Tensor) -> Tensor:
    """Returns the last states of all sequences, on every rank.

    Args:
        last: the states behind this rank's tokens, one for each of its sequences.
        first: the first states of all sequences, which are the last ones of sequences without tokens.
    """
    if part.cu is None and (part.ranks.count == 1 or not last.numel()):
        return last
    if part.cu is None:
        found = last.contiguous().clone()
        dist.broadcast(found, dist.get_global_rank(part.ranks.group, part.ranks.count - 1), group=part.ranks.group)
        return found
    found, own = torch.zeros_like(first), part.own
    assert own.rows is not None
    low, high = own.rows
    if own.leaves:
        high -= 1
    found[low:high] = last[: high - low]
    empty = empty_rows(part, first.device)
    found[empty] = 0
    if part.ranks.count > 1 and found.numel():
        # each row comes from one rank, and zeros from the others
        dist.all_reduce(found, group=part.ranks.group)
    found[empty] = first[empty]
    return found


def summed(part: Part, grad: Tensor) -> Tensor:
    """Returns the sum of all ranks' gradients of states that every rank has."""
    if part.ranks.count == 1 or not grad.numel():
        return grad
    total = grad.to(wide_dtype(grad)).contiguous().clone()
    dist.all_reduce(total, group=part.ranks.group)
    return total.to(grad.dtype)


def empty_rows(part: Part, device: torch.device) -> Tensor:
    """Returns the places of the sequences without tokens."""
    assert part.cu is not None
    return torch.tensor([n for n in range(len(part.cu) - 1) if part.cu[n] == part.cu[n + 1]], dtype=torch.long, device=device)
