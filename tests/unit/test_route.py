"""The route of a call to a paged KV cache: reading blocks in place, or from a gathered copy."""

from __future__ import annotations

import pytest
import torch

from rooftile.kvcache import PagedKV
from rooftile.kvcache.route import MOST_GATHERED, Route, route, route_of

# bytes of a token's keys and values in bf16: 8 heads of 128
TOKEN = 8 * (128 + 128) * 2
FIT = MOST_GATHERED // TOKEN

ANY = Route("any", gather=False)
ONE = Route("one", gather=False)
MANY = Route("many", gather=False)
COPIED = Route("many", gather=True)


@pytest.mark.parametrize(
    ("queries", "sequences", "size", "room", "facts", "due"),
    [
        # decoding: one query for each sequence, known on the host, and blocks that are not too small
        (1, 1, 16, 4096, {"packed": False}, ONE),
        (8, 8, 16, 4096, {"packed": False}, ONE),
        (8, 8, 16, 4096, {"packed": False, "fp8": True}, ONE),
        (8, 8, 256, 1 << 20, {"packed": False, "fp8": True}, ONE),
        (8, 8, 16, 4096, {"packed": False, "readable": False}, Route("one", gather=True)),
        (8, 8, 8, 4096, {"packed": False}, ANY),
        (8, 8, 16, 4096, {}, ANY),
        (8, 8, 16, 4096, {"packed": False, "deterministic": True}, ANY),
        # few queries
        (16, 8, 16, 4096, {"packed": False}, ANY),
        (63, 1, 16, 4096, {"packed": False}, ANY),
        (511, 8, 16, 4096, {}, ANY),
        # prompts: 64 queries per sequence, on average
        (64, 1, 16, 4096, {"packed": False}, MANY),
        (512, 8, 16, 4096, {}, MANY),
        (64, 1, 16, 1 << 20, {}, MANY),
        (64, 1, 16, 4096, {"deterministic": True}, ANY),
        # ... that no kernel reads in place: unreadable strides, small blocks, FP8
        (64, 1, 16, 4096, {"readable": False}, COPIED),
        (64, 1, 16, 1 << 20, {"readable": False}, COPIED),
        (64, 1, 8, 4096, {}, COPIED),
        (64, 1, 16, 4096, {"fp8": True}, COPIED),
        (64, 1, 128, 4096, {"fp8": True}, COPIED),
        # ... if the copy is at most a GiB
        (64, 1, 16, FIT, {"fp8": True}, COPIED),
        (64, 1, 16, FIT + 16, {"fp8": True}, ANY),
        (64, 1, 8, FIT, {}, COPIED),
        (64, 1, 8, FIT + 8, {}, ANY),
        (8192, 1, 16, 1 << 20, {"fp8": True}, ANY),
        # long prompts: a copy is short beside their products, unless blocks are large or the copy is
        (8191, 1, 16, 8192, {}, MANY),
        (8192, 1, 16, 8192, {}, COPIED),
        (8192, 1, 64, 8192, {}, COPIED),
        (8192, 1, 128, 8192, {}, MANY),
        (8192, 1, 128, 8192, {"readable": False}, COPIED),
        (8192, 1, 128, 8192, {"fp8": True}, COPIED),
        (8192, 2, 16, 8192, {}, MANY),
        (16_384, 2, 16, 8192, {}, COPIED),
        (8192, 1, 64, FIT, {}, COPIED),
        (8192, 1, 64, FIT + 64, {}, MANY),
        (8192, 1, 16, 8192, {"packed": False, "deterministic": True}, ANY),
        # nobody asks
        (0, 0, 16, 0, {}, COPIED),
    ],
)
def test_the_route_of_every_kind_of_call(queries, sequences, size, room, facts, due) -> None:
    """Compares the route from numbers with that from tensors. `room` is the capacity of each sequence's table in tokens."""
    facts = {"fp8": False, "packed": True, "deterministic": False, "readable": True} | facts
    assert route(queries, sequences, size, copy_bytes=sequences * room * TOKEN, **facts) == due
    dtype, scale = (torch.float8_e4m3fn, torch.ones(1, size, 8)) if facts["fp8"] else (torch.bfloat16, None)
    cache = PagedKV(
        k=torch.empty(1, size, 8, 128, dtype=dtype),
        v=torch.empty(1, size, 8, 128, dtype=dtype),
        table=torch.zeros(sequences, room // size, dtype=torch.int32),
        lengths=torch.zeros(sequences, dtype=torch.int32),
        cu_q=torch.zeros(sequences + 1, dtype=torch.int32) if facts["packed"] else None,
        k_scale=scale,
        v_scale=scale,
    )
    shape = (queries,) if facts["packed"] else (sequences, queries // sequences)
    q = torch.empty(*shape, 32, 128, dtype=torch.bfloat16, device="meta")
    assert route_of(q, cache, deterministic=facts["deterministic"], readable=facts["readable"]) == due
