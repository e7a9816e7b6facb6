"""Attention to a paged cache: decode, prefill, a shared prefix, and what writing to the cache moves.

    decode-BxS-hH-Hk      one query per sequence against S tokens of each: bytes read per second, beside FlashAttention-4 (CuTe)
    prefill-BxS-hH-Hk     whole prompts, beside the same without pages: `of_dense_ratio`, `of_packed_ratio` are speeds over theirs
    shared-prefix-BxP     B questions after the same P tokens, the prefix read by each of them or once
    native-sparse-BxS-hH-Hk   Native Sparse Attention's decoding beside exact decoding from blocks, and cuDNN's without
    cache                 writing keys and values, rotated or not, rotating queries, and copying blocks

In bf16 with head dim 128, blocks in random order. Decode and cache operations are timed in CUDA graphs replayed back to back
(`alone_us`: between events, the L2 cache flushed before each), the others between events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import rooftile as rt
from rooftile.cost import Roof, memory_roof, roof, traffic
from rooftile.cost.session import Session
from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL
from rooftile.hardware.clock import Clock, ReplayClock, Work, captured, clock_for, medians
from rooftile.kvcache import PagedKV
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, times_of, with_measures
from rooftile_lab.bench.run import Progress, words_of
from rooftile_lab.bench.suites import native_sparse_decode
from rooftile_lab.bench.suites.cache import cache

DIM = 128
# sequences, tokens of each in the cache, query heads, key heads
DECODE = ((64, 8192, 32, 8), (16, 32768, 64, 8), (1, 131072, 32, 8), (256, 1024, 32, 8), (64, 8192, 8, 8), (256, 640, 32, 8))
PREFILL = ((8, 2048, 32, 8), (1, 16384, 32, 8))
# tokens that all of 64 sequences begin with, before 256 of their own
PREFIXES = (2048, 32768)
OWN = 256
# Native Sparse Attention in place of exact attention
SPARSE = ((32, 65536, 64, 4), (32, 8192, 64, 4))
SHAPES = {
    **{f"decode-{B}x{S}-h{H}-{Hk}": (B, S, H, Hk) for B, S, H, Hk in DECODE},
    **{f"prefill-{B}x{S}-h{H}-{Hk}": (B, S, H, Hk) for B, S, H, Hk in PREFILL},
    **{f"native-sparse-{B}x{S}-h{H}-{Hk}": (B, S, H, Hk) for B, S, H, Hk in SPARSE},
    **{f"shared-prefix-64x{prefix}": (64, prefix, 32, 8) for prefix in PREFIXES},
}
GPU = (*SHAPES, "cache")
CPU = ()
QUICK = ("decode-64x8192-h32-8", "decode-256x640-h32-8", "prefill-8x2048-h32-8")


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant."""
    clock = clock_for(session.device, 12.0)
    for name in names:
        say(name)
        with torch.no_grad():
            if name == "cache":
                yield from cache(session, clock)
            elif name.startswith("native-sparse"):
                yield from native_sparse_decode.decode(session, ReplayClock(), name, *SHAPES[name])
            elif name.startswith("decode"):
                yield from decode(session, clock, name, *SHAPES[name])
            elif name.startswith("prefill"):
                yield from prefill(session, clock, name, *SHAPES[name])
            else:
                yield from shared(session, clock, name, *SHAPES[name])
        torch.cuda.empty_cache()


def problem_of(session: Session, B: int, T: int, S: int, H: int, Hk: int) -> Any:
    """The causal problem of T queries per sequence against S tokens."""
    case = Case(name="", tags=frozenset(), B=B, T=T, S=S, H=H, Hk=Hk, dim=DIM, dtype="bf16", mask=CAUSAL)
    return case.problem(session.machine.arch, needs_grad=False)


def decode(session: Session, clock: Clock, name: str, B: int, S: int, H: int, Hk: int) -> Iterator[Row]:
    """Ours with blocks of 16 and 128, by Triton, and in FP8, whose scales count among the bytes; and the peer."""
    problem = problem_of(session, B, 1, S, H, Hk)
    q = torch.randn(B, 1, H, DIM, device=session.device, dtype=torch.bfloat16)
    small, large = shuffled(session, B, S, Hk, 16), shuffled(session, B, S, Hk, 128)
    works: dict[str, Work] = {
        "rooftile, block 16": partial(rt.attention_paged, q, small, rt.CAUSAL),
        "triton, block 16": partial(rt.attention_paged, q, small, rt.CAUSAL, backend="triton"),
        "rooftile, fp8, block 16": partial(rt.attention_paged, q, in_fp8(small), rt.CAUSAL),
        "rooftile, block 128": partial(rt.attention_paged, q, large, rt.CAUSAL),
    }
    if find_spec("flash_attn"):
        works["fa4, block 128"] = peer(q, large)
    if find_spec("flash_attn_interface"):
        works |= {"fa3, block 16": flash_attention_3(q, small), "fa3, block 128": flash_attention_3(q, large)}
    floors: dict[str, Roof] = dict.fromkeys(works, memory_roof(traffic.decode(problem), session.ceilings))
    in_8_bits = traffic.decode(problem, kv_itemsize=1, scale_itemsize=4)
    floors["rooftile, fp8, block 16"] = memory_roof(in_8_bits, session.ceilings)
    alone = medians(works, clock)
    rows = contest(
        session, works, ReplayClock(), roofs=floors, rounds=6, suite="paged", case=name, phase="decode",
        problem=words_of(problem), settings={"timed": "replayed"},
    )  # fmt: skip
    for word, row in rows.items():
        yield with_measures(row, alone_us=alone[word])


def prefill(session: Session, clock: Clock, name: str, B: int, S: int, H: int, Hk: int) -> Iterator[Row]:
    """Prompts from blocks of four sizes, and as dense and packed sequences without pages."""
    problem = problem_of(session, B, S, S, H, Hk)
    q = torch.randn(B, S, H, DIM, device=session.device, dtype=torch.bfloat16)
    cu = torch.arange(B + 1, device=session.device, dtype=torch.int32) * S
    works: dict[str, Work] = {}
    for size in (16, 64, 128, 256):
        paged = replace(shuffled(session, B, S, Hk, size), cu_q=cu)
        works[f"rooftile, block {size}"] = partial(rt.attention_paged, q.flatten(0, 1), paged, rt.CAUSAL)
    k, v = (torch.randn(B, S, Hk, DIM, device=session.device, dtype=torch.bfloat16) for _ in range(2))
    lines = [x.flatten(0, 1) for x in (q, k, v)]
    works["rooftile, no pages"] = partial(rt.attention, q, k, v, rt.CAUSAL)
    works["rooftile, packed, no pages"] = partial(rt.attention_packed, lines[0], lines[1], lines[2], cu, cu, rt.CAUSAL)
    rows = contest(
        session, works, clock, roofs=roof(problem, session.ceilings), suite="paged", case=name, phase="prefill",
        problem=words_of(problem),
    )  # fmt: skip
    us = times_of(rows)
    dense, packed = us["rooftile, no pages"], us["rooftile, packed, no pages"]
    for word, row in rows.items():
        yield with_measures(row, of_dense_ratio=dense / us[word], of_packed_ratio=packed / us[word])


def shared(session: Session, clock: Clock, name: str, B: int, prefix: int, H: int, Hk: int) -> Iterator[Row]:
    """Questions of OWN tokens after one prefix, in graphs: several operations cost the host nothing then, as in an engine."""
    q = torch.randn(B, 1, H, DIM, device=session.device, dtype=torch.bfloat16)
    count = (prefix + B * OWN) // 16
    k, v = (torch.randn(count, 16, Hk, DIM, device=session.device, dtype=torch.bfloat16) for _ in range(2))
    blocks = torch.randperm(count, device=session.device).int()
    table = torch.cat([blocks[: prefix // 16].expand(B, -1), blocks[prefix // 16 :].view(B, -1)], 1)
    lengths = torch.full((B,), prefix + OWN, dtype=torch.int32, device=session.device)
    paged = PagedKV(k, v, table, lengths)
    graphs = {
        "rooftile, each reads the prefix": captured(partial(rt.attention_paged, q, paged, rt.CAUSAL)),
        "rooftile, the prefix is read once": captured(partial(rt.attention_paged, q, paged, rt.CAUSAL, shared_prefix=prefix)),
    }
    works = {word: graph.replay for word, graph in graphs.items()}
    yield from contest(session, works, clock, suite="paged", case=name, phase="decode", problem=f"{OWN} tokens after it").values()


def shuffled(session: Session, B: int, S: int, Hk: int, size: int) -> PagedKV:
    """A cache of B sequences of S tokens, in blocks that lie in random order."""
    count = S // size
    k, v = (torch.randn(B * count, size, Hk, DIM, device=session.device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(B * count, device=session.device).int().view(B, count)
    return PagedKV(k, v, table, torch.full((B,), S, dtype=torch.int32, device=session.device))


def in_fp8(paged: PagedKV) -> PagedKV:
    """A cache in FP8 with the same tables."""
    scales = [torch.full(paged.k.shape[:3], 0.01, device=paged.k.device) for _ in range(2)]
    k, v = paged.k.to(torch.float8_e4m3fn), paged.v.to(torch.float8_e4m3fn)
    return PagedKV(k, v, paged.table, paged.lengths, None, scales[0], scales[1])


def flash_attention_3(q: Tensor, paged: PagedKV) -> Work:
    """FlashAttention-3's decode."""
    flash_attn_with_kvcache = import_module("flash_attn_interface").flash_attn_with_kvcache
    return lambda: flash_attn_with_kvcache(q, paged.k, paged.v, cache_seqlens=paged.lengths, page_table=paged.table, causal=True)


def peer(q: Tensor, paged: PagedKV) -> Work:
    """FlashAttention-4's decode."""
    flash_attn_varlen_func = import_module("flash_attn.cute.interface").flash_attn_varlen_func
    return lambda: flash_attn_varlen_func(q, paged.k, paged.v, seqused_k=paged.lengths, page_table=paged.table, causal=True)
