"""The route of a call to a paged KV cache: reading blocks in place, or from a gathered copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.approximate import Loki
from rooftile.approximate.loki import decoding as paged
from rooftile.exact import api, dispatch
from rooftile.exact.masks import CAUSAL
from rooftile.exact.paged_route import MOST_GATHERED, Route, route, route_of
from rooftile.exact.spec import CallSettings, Spec
from rooftile.kvcache import PagedKV, Pages

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


def test_blocks_that_overlap_are_read_in_place_by_a_kernel_without_a_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loki's chosen pages are a view by heads: from one head to the next lies less than a block."""
    seen: list[tuple[Tensor, PagedKV]] = []
    prepare = api.prepare_paged

    def noted(q: Tensor, cache: PagedKV, *given: Any, **options: Any) -> Any:
        seen.append((q, cache))
        return prepare(q, cache, *given, **options)

    monkeypatch.setattr(api, "prepare_paged", noted)
    k, q = torch.randn(1, 64, 2, 64), torch.randn(1, 1, 4, 64)
    Loki.fit(k).attend(q, k, k, unit="page")
    table, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([64], dtype=torch.int32)
    whole = Pages(8, 1, 2, 64, block_size=16, dtype=torch.float32).view(0, table, lengths)
    paged.attend(q[:, 0], whole, torch.tensor([[[0, 3], [1, 3]]]), torch.tensor([32], dtype=torch.int32), CallSettings(0.1))
    assert [route_of(*call) for call in seen] == [ANY, ANY]
    assert route_of(q, whole) == ONE


@pytest.mark.parametrize(("queries", "name"), [("one", "hopper"), ("any", "triton")])
def test_who_decodes_on_hopper(queries: str, name: str) -> None:
    spec = Spec(
        dtype=torch.bfloat16, dim=128, dim_v=128, group=4, mask=CAUSAL, scale=1.0, layout="paged", queries=queries, device="sm90"
    )  # fmt: skip
    assert next(each.NAME for each in dispatch.ORDER if not [*each.refusals(spec)]) == name
