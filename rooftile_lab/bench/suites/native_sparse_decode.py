"""Decoding with Native Sparse Attention beside exact decoding: ours from the same blocks, and cuDNN's from dense tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import rooftile as rt
from rooftile.approximate.native_sparse import decoding as native_sparse
from rooftile.cost import Roof, memory_roof, traffic
from rooftile.cost import approximate as cost
from rooftile.cost.session import Session
from rooftile.exact.cases import Case, Inputs
from rooftile.exact.masks import CAUSAL
from rooftile.hardware.clock import Sampler, Work
from rooftile.kvcache import PagedKV
from rooftile.models import NativeSparseSizes
from rooftile_lab.bench.methods.way import roof_of
from rooftile_lab.bench.peers import provider_named
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, times_of, with_measures
from rooftile_lab.bench.run import words_of

DIM, SIZE = 128, 16
CUDNN = "torch-cudnn, dense"


def decode(session: Session, clock: Sampler, name: str, B: int, S: int, H: int, Hk: int) -> Iterator[Row]:
    """One query per sequence against S tokens of each, with the paper's sizes; blocks of 16 in random order.

    `of_exact_ratio` is the speed over our exact decoding's, `of_cudnn_ratio` over cuDNN's; `compulsory_bytes` are counted.
    """
    sizes = NativeSparseSizes()
    case = Case(name=name, tags=frozenset(), B=B, T=1, S=S, H=H, Hk=Hk, dim=DIM, dtype="bf16", mask=CAUSAL)
    problem = case.problem(session.machine.arch, needs_grad=False)
    draw = partial(torch.randn, device=session.device, dtype=torch.bfloat16)
    q, gates = draw(B, 1, H, DIM), draw(B, H, 3).sigmoid()
    blocks = B * -(-S // SIZE)
    k, v = (draw(blocks, SIZE, Hk, DIM) for _ in range(2))
    compressed = [draw(blocks, SIZE // sizes.stride, Hk, DIM) for _ in range(2)]
    # rows of windows: enough that no two sequences share one
    rows = B * (sizes.window // SIZE + 2)
    near = [draw(rows, SIZE, Hk, DIM) for _ in range(2)]
    table = torch.randperm(blocks, device=session.device).int().view(B, -1)
    near_table = (torch.arange(table.numel(), device=session.device) % rows).int().view_as(table)
    lengths = torch.full((B,), S, dtype=torch.int32, device=session.device)
    paged = PagedKV(k, v, table, lengths)
    works: dict[str, Work] = {
        "native sparse": partial(
            native_sparse.decode, q[:, 0], gates, (compressed[0], compressed[1]), (k, v), (near[0], near[1]), table, near_table,
            lengths,
            scale=DIM**-0.5, window=sizes.window, **sizes.keywords(),
        ),
        "rooftile, block 16": partial(rt.attention_paged, q, paged, CAUSAL),
    }  # fmt: skip
    named = {"suite": "paged", "case": name, "phase": "decode", "problem": words_of(problem)}
    counted = cost.native_sparse_decode([S] * B, H, Hk, DIM, DIM, window=sizes.window)
    exact = memory_roof(traffic.decode(problem), session.ceilings)
    floors: dict[str, Roof] = {"native sparse": roof_of(counted, session.ceilings, "bf16"), "rooftile, block 16": exact}
    cudnn = provider_named("torch-cudnn")
    if cudnn.reason(case, session.device, False) is None:
        dense = tuple(x.view(B, -1, Hk, DIM)[:, :S] for x in (k, v))
        works[CUDNN], floors[CUDNN] = cudnn.prepare(case, Inputs((q, *dense), CAUSAL, {})), exact
    found = contest(session, works, clock, roofs=floors, rounds=6, settings={"timed": "replayed"}, **named)
    us = times_of(found)
    for word, row in found.items():
        more = {"of_cudnn_ratio": us[CUDNN] / us[word]} if CUDNN in us else {}
        yield with_measures(
            row, of_exact_ratio=us["rooftile, block 16"] / us[word], compulsory_bytes=floors[word].bytes_moved, **more
        )
