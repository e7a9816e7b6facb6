"""Functions that each rank runs in the tests of plans, groups of heads and the benchmark."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Window
from rooftile.hardware import link
from rooftile.parallel import context_attention, gathered, shard
from rooftile.parallel.traffic import Sequence, bytes_sent
from tests.parallel.context_cases import OFFSETS, _difference

HELD = ((None, "zigzag"), (OFFSETS, "zigzag"), (OFFSETS, "balanced"))
MASKS = (FULL, CAUSAL, CAUSAL & Window(7))


def counted(rank: int, ranks: int) -> list[tuple[str, int, int]]:
    """Returns for each call the most bytes that a rank sent to others, and those that `bytes_sent` says."""
    sent = [0]
    whole, send = dist.all_to_all_single, dist.batch_isend_irecv

    def all_to_all_single(got: Tensor, x: Tensor, received: Any, sizes: list[int], **named: Any) -> Any:
        sent[0] += (sum(sizes) - sizes[dist.get_rank(named.get("group"))]) * x.element_size()
        return whole(got, x, received, sizes, **named)

    def batch_isend_irecv(operations: list[dist.P2POp]) -> Any:
        sent[0] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return send(operations)

    def most() -> int:
        found = torch.tensor(sent[0])
        sent[0] = 0
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    dist.all_to_all_single, dist.batch_isend_irecv = all_to_all_single, batch_isend_irecv
    found = []
    grid = init_device_mesh("cpu", (ranks // 2, 2)) if ranks % 2 == 0 else None
    methods = ("gather", "ulysses", "ring", "usp", "usp-gather")
    for method, mask, (cu, layout), tokens in product(methods if grid else methods[:3], MASKS, HELD, (36, 37)):
        if (cu and tokens != OFFSETS[-1]) or (method == "ulysses" and (tokens % ranks or 4 % ranks)):
            continue
        group = grid if "usp" in method else None
        if group and tokens % ranks:
            continue
        outer = (tokens,) if cu else (2, tokens)
        pack = torch.tensor(cu) if cu else None
        whole_leaves = [torch.randn(*outer, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 16))]
        leaves = [shard(x, group, len(outer) - 1, layout, pack).requires_grad_() for x in whole_leaves]
        problem = Sequence(
            tokens=tokens, ranks=ranks, mask=mask, H=4, Hk=2, D=8, Dv=16, B=1 if cu else 2, itemsize=4, cu=cu,
            layout=layout, inner=2 if group else 0,
        )  # fmt: skip
        sent[0] = 0
        o = context_attention(*leaves, mask, group=group, layout=layout, method=method, tokens=tokens, cu=pack)
        name = f"{layout} {method} {mask} {cu} {tokens}"
        found.append((f"{name} fwd", most(), bytes_sent(method, problem)))
        o.sum().backward()
        back = bytes_sent(method, problem, "bwd")
        if method == "ulysses" or group:
            # lse has no gradient here
            row = 2 if group else ranks
            back -= tokens // ranks * (row - 1) * problem.B * problem.H * 4 // row
        found.append((f"{name} bwd", most(), back))
    dist.all_to_all_single, dist.batch_isend_irecv = whole, send
    return found


def by_groups(rank: int) -> list[tuple[int, float]]:
    """Returns the number of groups of heads, and the worst difference from one process, of calls that go by groups."""
    gathered.GROUP_BYTES, taken = 512, []
    cut = gathered.groups_of

    def groups_of(*sizes: int) -> int:
        taken.append(cut(*sizes))
        return taken[-1]

    gathered.groups_of = groups_of
    found = []
    calls: tuple[tuple[Mask, Any, str, tuple[str, ...]], ...] = (
        (CAUSAL, None, "zigzag", ("sinks", "softcap", "scale")),
        (CAUSAL, OFFSETS, "zigzag", ("alibi",)),
        (Chunk(6), None, "contiguous", ()),
    )
    for mask, cu, layout, names in calls:
        difference = _difference(37, 8, 4, mask, cu, layout, "gather", names)
        found.append((taken[-1], difference))
    return found


def measured_link(rank: int) -> tuple[link.Link, link.Link | None, bool]:
    """Returns the link, what is known of it afterwards, and whether a device without a table has none before."""
    group, device = dist.group.WORLD, torch.device("cpu")
    before = link.known(group, device)
    return link.measure(group, device), link.known(group, device), before is None


def benchmark(rank: int) -> list[dict[str, Any]]:
    """Returns the rows of a case of the benchmark."""
    from rooftile_lab.bench.suites import context_parallel
    from tests.bench.session import SESSION

    rows = context_parallel.measure(SESSION, ["cpu-documents"], lambda words: None)
    return [{"backend": row.backend, "phase": row.phase, "reason": row.reason, **row.measures, **row.settings} for row in rows]
