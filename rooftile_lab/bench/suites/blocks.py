"""Attention over lists of blocks beside the whole of it, and beside FlexAttention with the same lists.

A case names the head dim, the lists and the length: random lists of a share of all blocks of 128 (`p10` is 10 %), or the causal
mask given as a list (`causal`). They have a batch of 1, and 16 heads with lists of their own. `documents` is FlexAttention's
BlockMask of sixteen documents under a causal mask, whose blocks at the edges are seen in part. `video` has blocks of 64, 64 of
them a row, over 109,632 tokens and 7 heads. `lists` makes lists for 16 heads from 512 x 512 booleans.

`live_tflops` counts the pairs of listed blocks, under a causal list its visible ones; `of_whole_ratio` is it over the TFLOP/s of
the fastest backend without lists (`whole`: the full mask; for the causal list CAUSAL) in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rooftile as rt
from rooftile import Blocks
from rooftile.cost.flops import PHASES
from rooftile.cost.session import Session
from rooftile.exact.masks import CAUSAL, FULL, Mask
from rooftile.hardware.clock import Work, clock_for
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import compiled_flex, step

LENGTHS = {"32k": 32_768, "8k": 8192, "512": 512}
GPU = (
    *(f"d{dim}-{lists}-32k" for dim in (64, 128) for lists in ("p10", "p25", "p50", "causal", "documents")),
    "d128-video", "lists",
)  # fmt: skip
CPU = ("d64-p50-512", "d64-causal-512", "d64-documents-512")
QUICK = ("d128-p25-32k", "lists")
# the smallest blocks that FlexAttention's tiles divide
FLEX_LEAST = 128


class Problem(NamedTuple):
    """The tensors of a case. `pairs` are seen by all heads together."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Blocks
    mask: Mask  # without lists
    pairs: float
    whole_pairs: float
    block_mask: Any = None  # FlexAttention's, of which the blocks are made


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    clock = clock_for(session.device)
    for name in names:
        say(name)
        if name == "lists":
            keep = torch.rand(1, 16, 512, 512, device=session.device) < 0.25
            works = {"rooftile": partial(Blocks.from_dense, keep)}
            yield from contest(session, works, clock, dtype="bf16", suite="blocks", case=name, phase="fwd").values()
            continue
        it = problem(name, session.device)
        flops = 4 * it.q.shape[-1] * it.pairs
        whole_flops = 4 * it.q.shape[-1] * it.whole_pairs
        for phase in PHASES:
            if session.device.type == "cuda" and min(it.blocks.block_size) < FLEX_LEAST:
                why = f"refused: FlexAttention takes blocks of {FLEX_LEAST} and more"
                yield Row(**session.about("bf16"), suite="blocks", case=name, backend="flex", phase=phase, reason=why)
            rows = contest(
                session, contestants(it, phase, session.device), clock, dtype="bf16", suite="blocks", case=name, phase=phase,
                problem=f"{it.mask}, B 1 T {it.q.shape[1]} H {it.q.shape[2]} D {it.q.shape[3]}, blocks {it.blocks.block_size}",
            )  # fmt: skip
            us, work = times_of(rows), 1.0 if phase == "fwd" else 2.5
            whole = work * whole_flops / us["whole"] / 1e6
            for kind, row in rows.items():
                live = work * (whole_flops if kind == "whole" else flops) / us[kind] / 1e6
                yield with_measures(row, live_tflops=live, of_whole_ratio=live / whole)


def problem(name: str, device: torch.device) -> Problem:
    """The problem of a case's name."""
    dim = int(name.split("-")[0][1:])
    if name.endswith("video"):
        T, heads, size, wanted = 109_632, 7, 64, 64.0
    else:
        T, heads, size, wanted = LENGTHS[name.split("-")[2]], 16, 128, 0.0
    n = T // size
    q, k, v = (torch.randn(1, T, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    if "documents" in name:
        return _documents(q, k, v)
    if "causal" in name:
        keep = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        pairs = heads * T * (T + 1) / 2
        # the list has the blocks on the diagonal, and the mask cuts them
        return Problem(q, k, v, Blocks.from_dense(keep, (size, size)), CAUSAL, pairs, pairs)
    share = wanted / n if wanted else int(name.split("-")[1][1:]) / 100
    scores = torch.rand(1, heads, n, n, device=device)
    # each list has the same length
    chosen = scores.topk(max(round(share * n), 1), dim=-1).indices
    keep = torch.zeros(1, heads, n, n, dtype=torch.bool, device=device).scatter(-1, chosen, True)
    blocks = Blocks.from_dense(keep, (size, size))
    return Problem(q, k, v, blocks, FULL, float(chosen.numel() * size**2), float(heads * T * T))


def _documents(q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """Sixteen documents of the same length, none of which ends where a block does but the last, under a causal mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    T, heads = q.shape[1:3]
    length = T // 16 + 1

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i // length == j // length) & (i >= j)

    mask = create_block_mask(seen, None, None, T, T, device=str(q.device), BLOCK_SIZE=128)
    documents = [min(length, T - start) for start in range(0, T, length)]
    pairs = heads * sum(n * (n + 1) / 2 for n in documents)
    return Problem(q, k, v, Blocks.from_block_mask(mask), CAUSAL, pairs, heads * T * (T + 1) / 2, mask)


def contestants(it: Problem, phase: str, device: torch.device) -> dict[str, Work]:
    """The works of a phase by the names of their rows."""
    forwards: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        # bits say all that a mask would
        "rooftile": lambda q, k, v: rt.attention(q, k, v, FULL if it.block_mask else it.mask, blocks=it.blocks),
        "whole": lambda q, k, v: rt.attention(q, k, v, it.mask),
    }
    if device.type == "cuda" and min(it.blocks.block_size) >= FLEX_LEAST:
        forwards["flex"] = _flex(it)
    return {name: step(forward, (it.q, it.k, it.v), phase) for name, forward in forwards.items()}


def _flex(it: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention, compiled, with the same lists."""
    from torch.nn.attention.flex_attention import BlockMask

    flex, blocks = compiled_flex(), it.blocks
    if it.block_mask is not None:
        lists = it.block_mask
    elif it.mask == CAUSAL:
        from torch.nn.attention.flex_attention import create_block_mask

        T = it.q.shape[1]
        lists = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=it.q.device, _compile=True)
    else:
        none = torch.zeros_like(blocks.counts)
        lists = BlockMask.from_kv_blocks(none, blocks.indices, blocks.counts, blocks.indices, BLOCK_SIZE=blocks.block_size)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=lists).transpose(1, 2)

    return forward
