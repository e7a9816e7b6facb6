"""Attention to a paged cache: how many bytes of it a second decoding reads, beside a copy; prompts beside the unpaged kernel;
what appending and copying blocks move.

    PYTHONPATH=. python benchmarks/paged.py COMMIT >> benchmarks/results/h200-paged.jsonl

bf16, D = 128, blocks in random order; contestants take turns, medians of all samples. Decoding, appending and copies are timed in
graphs replayed back to back, all else (and `alone_us`) between events, the L2 cache flushed before each. The peer is
FlashAttention-4 (CuTe), where it is installed, at the block sizes that it takes.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch

import rooftile as rt
from rooftile.bench.clock import clock_for, medians
from rooftile.bench.session import open_session
from rooftile.kvcache import PagedKV, Pages, Rotation, rotate
from rooftile.kvcache.kernels import copy_blocks

DIM = 128
# of a cache that is written to, one after the other; and lists of blocks that are copied
LAYERS = 8
# sequences, tokens of each in the cache, heads, heads of keys
DECODING = [
    (64, 8192, 32, 8),
    (16, 32768, 64, 8),
    (1, 131072, 32, 8),
    (256, 1024, 32, 8),
    (64, 8192, 8, 8),
    (256, 640, 32, 8),
]
PROMPTS = [(8, 2048, 32, 8), (1, 16384, 32, 8)]
# tokens that all of 64 sequences begin with, before 256 of their own
PREFIXES = [2048, 32768]


def shuffled(B: int, S: int, Hk: int, size: int) -> PagedKV:
    count = S // size
    k, v = (torch.randn(B * count, size, Hk, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(B * count, device="cuda").int().view(B, count)
    return PagedKV(k, v, table, torch.full((B,), S, dtype=torch.int32, device="cuda"))


def in_fp8(cache: PagedKV) -> PagedKV:
    """A cache as large, with the same tables."""
    scales = [torch.full(cache.k.shape[:3], 0.01, device="cuda") for _ in range(2)]
    return PagedKV(
        cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn), cache.table, cache.lengths, None, *scales
    )


def peer(q: torch.Tensor, cache: PagedKV) -> Callable[[], Any]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    return lambda: flash_attn_varlen_func(
        q, cache.k, cache.v, seqused_k=cache.lengths, page_table=cache.table, causal=True
    )


def replayed(works: dict[str, Callable[[], Any]], times: int = 10, rounds: int = 6) -> dict[str, float]:
    """The median time of a call in µs, in graphs replayed back to back: as an engine runs it, and what peers publish.

    A cache is ten times the L2 at least, so nothing of it is found there. Events around single calls would add what a launch
    takes, and a flush before each leaves an L2 full of what must be written back meanwhile.
    """
    graphs = {name: captured(work) for name, work in works.items()}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[name]()
            start.record()
            for _ in range(times):
                graphs[name]()
            stop.record()
            torch.cuda.synchronize()
            taken[name].append(start.elapsed_time(stop) * 1e3 / times)
    return {name: median(each) for name, each in taken.items()}


def decoding(clock: Any, copy_gbs: float) -> list[dict[str, Any]]:
    """Beside bf16 a cache in FP8, whose bytes count its scales."""
    rows = []
    for B, S, H, Hk in DECODING:
        q = torch.randn(B, 1, H, DIM, device="cuda", dtype=torch.bfloat16)
        works: dict[str, Callable[[], Any]] = {}
        for size in (16, 128):
            cache = shuffled(B, S, Hk, size)
            works[f"rooftile, block {size}"] = partial(rt.attention_paged, q, cache, rt.CAUSAL)
            if size == 16:
                works["rooftile, portable, block 16"] = partial(rt.attention_paged, q, cache, rt.CAUSAL, backend="triton")
                works["rooftile, fp8, block 16"] = partial(rt.attention_paged, q, in_fp8(cache), rt.CAUSAL)
            if importlib.util.find_spec("flash_attn") and size == 128:
                works[f"fa4, block {size}"] = peer(q, cache)
        alone, found = medians(works, clock), replayed(works)
        for name, us in found.items():
            moved = B * S * Hk * 2 * (DIM + 4 if "fp8" in name else DIM * 2)
            row: dict[str, Any] = {"what": name, "queries": 1, "B": B, "S": S, "heads": f"{H}/{Hk}", "us": round(us, 1)}
            row |= {"tbs": round(moved / us / 1e6, 3), "of_copy": round(moved / us / 1e3 / copy_gbs, 3)}
            rows.append(row | {"timed": "replayed", "alone_us": round(alone[name], 1)})
        del works
        torch.cuda.empty_cache()
    return rows


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """As an engine runs it: what is made of several operations costs the host nothing then."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def shared(clock: Any) -> list[dict[str, Any]]:
    """64 questions after one prefix, read for each of them, or once."""
    B, own, H, Hk = 64, 256, 32, 8
    rows = []
    for prefix in PREFIXES:
        q = torch.randn(B, 1, H, DIM, device="cuda", dtype=torch.bfloat16)
        count = (prefix + B * own) // 16
        k, v = (torch.randn(count, 16, Hk, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        blocks = torch.randperm(count, device="cuda").int()
        table = torch.cat([blocks[: prefix // 16].expand(B, -1), blocks[prefix // 16 :].view(B, -1)], 1)
        cache = PagedKV(k, v, table, torch.full((B,), prefix + own, dtype=torch.int32, device="cuda"))
        works = {
            "each reads the prefix": captured(partial(rt.attention_paged, q, cache, rt.CAUSAL)),
            "the prefix is read once": captured(partial(rt.attention_paged, q, cache, rt.CAUSAL, shared_prefix=prefix)),
        }
        about = {"B": B, "S": prefix + own, "heads": f"{H}/{Hk}"}
        rows += [{"what": name, **about, "us": round(us, 1)} for name, us in medians(works, clock).items()]
    return rows


def prompts(clock: Any) -> list[dict[str, Any]]:
    rows = []
    for B, S, H, Hk in PROMPTS:
        q = torch.randn(B, S, H, DIM, device="cuda", dtype=torch.bfloat16)
        cu = torch.arange(B + 1, device="cuda", dtype=torch.int32) * S
        works: dict[str, Callable[[], Any]] = {}
        for size in (16, 64, 128, 256):
            paged = replace(shuffled(B, S, Hk, size), cu_q=cu)
            works[f"rooftile, block {size}"] = partial(rt.attention_paged, q.flatten(0, 1), paged, rt.CAUSAL)
        k, v = (torch.randn(B, S, Hk, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        lines = [x.flatten(0, 1) for x in (q, k, v)]
        works["rooftile, no pages"] = partial(rt.attention, q, k, v, rt.CAUSAL)
        works["rooftile, packed, no pages"] = partial(rt.attention_packed, *lines, cu, cu, rt.CAUSAL)
        found = medians(works, clock)
        flops = 2 * B * H * S * S * DIM
        for name, us in found.items():
            row: dict[str, Any] = {"what": name, "queries": S, "B": B, "S": S, "heads": f"{H}/{Hk}", "us": round(us, 1)}
            row |= {"of_unpaged": round(found["rooftile, no pages"] / us, 3)}
            row |= {"of_packed": round(found["rooftile, packed, no pages"] / us, 3)}
            rows.append(row | {"tflops": round(flops / us / 1e6, 1)})
    return rows


def pages(clock: Any, copy_gbs: float) -> list[dict[str, Any]]:
    """A prompt's keys and values into their slots, rotated or not, and copies of blocks: as in LAYERS layers of 8 heads.

    A replay goes through all layers, each with queries, keys and values of its own, and copies other blocks each time: what
    one writes is long out of the L2 cache when it is written again.
    """
    blocks, heads, tokens, copies = 8192, 8, 16384, 512
    held = Pages(blocks, LAYERS, heads, DIM, device="cuda")
    layers = torch.randn(LAYERS, tokens, 6 * heads * DIM, device="cuda", dtype=torch.bfloat16).unflatten(2, (-1, DIM))
    queries, keys, values = layers.split([4 * heads, heads, heads], 2)
    slots = (torch.randperm(blocks, device="cuda")[: tokens // 16, None] * 16 + torch.arange(16, device="cuda")).flatten()
    angles = torch.rand(tokens, DIM // 2, device="cuda")
    rotation = Rotation(angles.cos(), angles.sin())
    pairs = torch.randperm(blocks, device="cuda").view(-1, copies, 2)
    steps: dict[str, Callable[[int], Any]] = {
        "append": lambda i: held.write(i, keys[i], values[i], slots),
        "append, rotated": lambda i: held.write(i, keys[i], values[i], slots, rotation),
        "rotate queries": lambda i: rotate(queries[i], rotation),
        "copy blocks": lambda i: copy_blocks(held.storage, pairs[i]),
    }
    line, turns = heads * DIM * 2, DIM * 4
    moved = {
        "append": tokens * 4 * line,
        "append, rotated": tokens * (4 * line + turns),
        "rotate queries": tokens * (8 * line + turns),
        "copy blocks": copies * 2 * held.storage[0].nbytes,
    }
    alone = medians({name: partial(step, 3) for name, step in steps.items()}, clock)
    found = replayed({name: partial(_each, step) for name, step in steps.items()}, times=2)
    rows = []
    for name, all_us in found.items():
        us = all_us / LAYERS
        gbs = moved[name] / us / 1e3
        row: dict[str, Any] = {"what": name, "us": round(us, 1), "tbs": round(gbs / 1e3, 3), "of_copy": round(gbs / copy_gbs, 3)}
        rows.append(row | {"timed": "replayed", "alone_us": round(alone[name], 1)})
    return rows


def _each(step: Callable[[int], Any]) -> None:
    for i in range(LAYERS):
        step(i)


def main(commit: str) -> None:
    clock, session = clock_for(torch.device("cuda"), 12.0), open_session(torch.device("cuda"))
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    about |= {"copy_gbs": session.ceilings.copy_gbs, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    copy_gbs = session.ceilings.copy_gbs
    for row in decoding(clock, copy_gbs) + prompts(clock) + shared(clock) + pages(clock, copy_gbs):
        print(json.dumps(row | about), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "unknown")
