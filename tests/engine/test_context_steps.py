"""Attention over several ranks' caches is the attention over one: ranks are threads here, and tokens are numbers."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rooftile.engine.mixers.exact.context_step import ContextLayers, ContextStep
from rooftile.engine.mixers.exact.own_keys import OwnKeys
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.steps.step_inputs import Chunks, StepInputs
from rooftile.exact import reference
from rooftile.exact.masks import CAUSAL, Window
from rooftile.exact.spec import CallSettings
from rooftile.kvcache import Pages
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.context_share import ContextShare

SIZE, H, HK, D = 8, 4, 2, 16
SETTINGS = CallSettings(0.3, 5.0, partial=True)


class Work(NamedTuple):
    """Tokens of a sequence that a step reads."""

    slot: int
    start: int
    tokens: int


# chunks from the middle of a block to the middle of another, of one token, at the beginning, and single tokens beside them
STEPS = [
    [Work(0, 0, 37), Work(1, 0, 3)],
    [Work(0, 37, 90), Work(2, 0, 64), Work(1, 3, 1)],
    [Work(2, 64, 2), Work(0, 127, 1), Work(1, 4, 1)],
    [Work(1, 5, 200), Work(3, 0, 1)],
    [Work(0, 128, 1), Work(1, 205, 1), Work(2, 66, 1), Work(3, 1, 1)],
]
LENGTHS = (129, 206, 67, 2)


class Ranks:
    """The exchange between ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.barrier, self.given = ranks, threading.Barrier(ranks), [torch.empty(0)] * ranks

    def share(self, rank: int) -> ContextShare:
        def gather(x: Tensor) -> Tensor:
            self.given[rank] = x
            self.barrier.wait(300)
            found = torch.stack(self.given)
            self.barrier.wait(300)
            return found

        return ContextShare(rank, self.ranks, SIZE, gather, lambda x: x)


def ready(ranks: int) -> tuple[int | None, ...]:
    """Windows of three layers: none, and two multiples of a block of all ranks."""
    return None, SIZE * ranks, 3 * SIZE * ranks


def step_of(works: list[Work], table: Tensor, share: ContextShare) -> StepTokens:
    """Lays out work as a runner does."""
    ordered = sorted(works, key=lambda work: work.tokens == 1)
    chunks = [work for work in ordered if work.tokens > 1]
    positions = torch.cat([torch.arange(work.start, work.start + work.tokens) for work in ordered])
    slots = torch.cat([torch.full((work.tokens,), work.slot) for work in ordered])
    cu_q = torch.tensor([0, *(work.tokens for work in chunks)]).cumsum(0)
    ends, its = torch.tensor([[work.start + work.tokens, work.slot] for work in chunks], dtype=torch.int64).reshape(-1, 2).T
    none = torch.empty(0, dtype=torch.int64)
    host = StepInputs(torch.zeros_like(positions), positions, slots, none, none, none, cu_q, ends, its)
    cells = share.cells(table[slots, positions // share.block].long(), positions)
    split = int(cu_q[-1])
    together = Chunks(split, table[its], ends.int(), cu_q.int()) if chunks else None
    single = (table[slots[split:]], (positions[split:] + 1).int()) if split < len(slots) else None
    return StepTokens(share.block, cells, positions, slots, table, together, single, host)


def attended(ranks: int, kv: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype, sinks: Tensor | None) -> list[list[Tensor]]:
    """Runs all steps on all ranks; returns for each layer the outputs of each sequence, which all ranks agree on."""
    group, windows = Ranks(ranks), ready(ranks)
    columns = -(-max(LENGTHS) // (SIZE * ranks))
    table = torch.randperm(len(LENGTHS) * columns).view(len(LENGTHS), columns).int()
    found: list[list[list[Tensor]]] = [[] for _ in range(ranks)]
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            share = group.share(rank)
            pages = Pages(table.numel(), len(windows), HK, D, block_size=SIZE, dtype=dtype)
            # cells that were never written must not be read
            pages.storage.view(torch.uint8).fill_(0xFF)
            caches = Caches(pages, {n: n for n in range(len(windows))})
            caches.share = share
            own = OwnKeys(
                share, heads=HK, group=H // HK, dim=D, tokens=300, chunks=4, dtype=dtype, device=torch.device("cpu")
            )  # fmt: skip
            known = {} if sinks is None else dict.fromkeys(range(len(windows)), sinks)
            layers = ContextLayers(caches, windows, SETTINGS, known, own)
            outputs = [[torch.empty(0, H, D, dtype=kv[0][0].dtype)] * len(LENGTHS) for _ in windows]
            for works in STEPS:
                attend = ContextStep(layers, step_of(works, table, share))
                ordered = sorted(works, key=lambda work: work.tokens == 1)
                given = [
                    torch.cat([x[work.slot][work.start :][: work.tokens] for work in ordered]) for x in zip(*kv, strict=True)
                ]
                for layer in range(len(windows)):
                    parts = attend(layer, *given, None).split([work.tokens for work in ordered])
                    for work, part in zip(ordered, parts, strict=True):
                        outputs[layer][work.slot] = torch.cat((outputs[layer][work.slot], part))
            found[rank] = outputs
        except BaseException as error:
            failed.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    for outputs in found[1:]:
        for mine, its in zip(outputs, found[0], strict=True):
            for one, other in zip(mine, its, strict=True):
                assert torch.equal(one, other)
    return found[0]


def sequences(dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(4)
    return [tuple(torch.randn(n, heads, D).to(dtype) for heads in (H, HK, HK)) for n in LENGTHS]  # type: ignore[misc]


def definition(kv: tuple[Tensor, Tensor, Tensor], window: int | None, sinks: Tensor | None) -> Tensor:
    q, k, v = (x[None].double() for x in kv)
    mask = CAUSAL if window is None else CAUSAL & Window(window - 1)
    o, _ = reference.attention(q, k, v, mask, scale=0.3, softcap=5.0, sinks=None if sinks is None else sinks.double())
    return o[0]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_outputs_are_those_of_the_definition(ranks: int, with_sinks: bool) -> None:
    """Also with more ranks than key heads, of which some attend to no chunk's own keys."""
    kv, sinks = sequences(torch.float32), torch.tensor([1.0, -2.0, 3.0, 0.0]) if with_sinks else None
    for window, outputs in zip(ready(ranks), attended(ranks, kv, torch.float32, sinks), strict=True):
        for each, found in zip(kv, outputs, strict=True):
            torch.testing.assert_close(found.double(), definition(each, window, sinks), atol=2e-6, rtol=1e-5)


def test_parts_are_merged_in_fp32() -> None:
    """In bf16 four ranks have the error of one: each number is rounded once."""
    kv = sequences(torch.bfloat16)
    errors = {}
    for ranks in (1, 4):
        outputs = attended(ranks, kv, torch.bfloat16, None)[0]
        errors[ranks] = torch.cat([(o - definition(each, None, None)).abs() for o, each in zip(outputs, kv, strict=True)]).mean()
    assert errors[4] < 1.02 * errors[1]


def test_a_chunk_reads_its_own_keys_as_the_cache_rounds_them() -> None:
    """In FP8 the outputs are those of one rank, since scales belong to tokens."""
    kv = sequences(torch.float32)
    one, four = (attended(ranks, kv, torch.float8_e4m3fn, None)[0] for ranks in (1, 4))
    for mine, its in zip(four, one, strict=True):
        torch.testing.assert_close(mine, its, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_token_lies_on_one_rank(ranks: int) -> None:
    group, positions = Ranks(ranks), torch.arange(300)
    blocks = positions // (SIZE * ranks)
    cells = torch.stack([group.share(rank).cells(blocks, positions) for rank in range(ranks)])
    assert ((cells >= 0).sum(0) == 1).all()
    for rank in range(ranks):
        mine = cells[rank][cells[rank] >= 0]
        assert mine.tolist() == list(range(len(mine)))
        counted = torch.cat([torch.zeros(1, dtype=torch.int64), (cells[rank] >= 0).cumsum(0)])
        assert group.share(rank).held(torch.arange(301)).tolist() == counted.tolist()
