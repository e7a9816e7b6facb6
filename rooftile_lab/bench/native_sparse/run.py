"""The parts of Native Sparse Attention and the variants of its kernels, each checked first: a row for each.

One text, 64 / 4 heads of 128, the paper's sizes: the choice, the three branches and the gates as a call runs them; the selected
branch with 1, 2 and 4 queries to a tile; exact attention, FlashAttention-4 and fla's selection, where they can be imported.
`rooftile bench approximate` compares the methods; this says where the time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate.native_sparse.attention import compressed_attention
from rooftile.approximate.native_sparse.selected.gated_sum import gated_sum
from rooftile.cost import approximate as cost
from rooftile.cost import roof
from rooftile.cost.session import Session
from rooftile.exact.cases import Case, Inputs
from rooftile.exact.masks import CAUSAL, Window
from rooftile.hardware.clock import Clock, clock_for, take_turns
from rooftile_lab.bench.methods.peers import fla_selection
from rooftile_lab.bench.methods.way import roof_of
from rooftile_lab.bench.native_sparse.variants import (
    Prepared,
    Sizes,
    Variant,
    complaint,
    read_bytes,
    variants,
    works,
)
from rooftile_lab.bench.peers import provider_named
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import step

CHECKED_AT = 1024
LENGTH, STRIDE, WINDOW = 32, 16, 512
Leaves = tuple[Tensor, ...]


def parts(x: Prepared, sizes: Sizes) -> dict[str, tuple[Callable[..., Any], Leaves, tuple[str, ...]]]:
    """Returns the parts of a call: functions of tensors with gradients, these tensors, and the phases of each."""
    q, k, v, chosen = (each[None] for each in (x.q, x.k, x.v, x.chosen))
    kc, vc = ap.compress(k), ap.compress(v)
    options = {"backend": None, "deterministic": None, "scale": x.scale}
    lse = compressed_attention(q, kc, vc, sizes.N, LENGTH, STRIDE, options)[1]
    gates = torch.rand(*q.shape[:3], 3, device=q.device, dtype=q.dtype)
    near = CAUSAL & Window(WINDOW - 1)
    both = ("fwd", "bwd")
    choose: dict[str, Any] = {"tokens": sizes.N, "block_size": sizes.block, "count": sizes.count}
    return {
        "choice": (lambda q, k: ap.choose_blocks(q, k, lse=lse, **choose), (q, kc), ("fwd",)),
        "choice, two walks": (lambda q, k: ap.choose_blocks(q, k, **choose), (q, kc), ("fwd",)),
        "compressed": (lambda q, k, v: compressed_attention(q, k, v, sizes.N, LENGTH, STRIDE, options)[0], (q, kc, vc), both),
        "selected": (lambda q, k, v: ap.selected_attention(q, k, v, chosen, block_size=sizes.block), (q, k, v), both),
        "near": (lambda q, k, v: rt.attention(q, k, v, near), (q, k, v), both),
        "gates": (lambda *y: gated_sum(y[:3], y[3]), (x.o[None], x.o[None].clone(), x.o[None].clone(), gates), both),
        "whole": (
            lambda q, kc, vc, k, v, gates: ap.native_sparse(
                q, (kc, vc), (k, v), (k, v), gates, chosen=None, block_size=sizes.block, count=sizes.count
            ), (q, kc, vc, k, v, gates), both,
        ),
        "exact": (lambda q, k, v: rt.attention(q, k, v, CAUSAL), (q, k, v), both),
    }  # fmt: skip


def peers(x: Prepared, sizes: Sizes) -> Iterator[tuple[str, Callable[..., Any] | str]]:
    """Peers by name: a function of q, k and v, or why it is not timed."""
    case = Case(name="exact", tags=frozenset(), B=1, T=sizes.N, S=sizes.N, H=sizes.H, Hk=sizes.Hk, dim=sizes.D, mask=CAUSAL)
    fa4 = provider_named("fa4")
    reason = fa4.reason(case, x.q.device, True)
    yield "fa4", reason or (lambda *y: fa4.prepare(case, Inputs(y, CAUSAL, {}))())
    if find_spec("fla") is None or x.q.device.type != "cuda":
        yield "fla selection", "not installed, or no GPU"
        return
    selection = partial(fla_selection, chosen=x.chosen[None], block=sizes.block)
    q, k, v = (each[None] for each in (x.q, x.k, x.v))
    error = ((selection(q, k, v)[0].float() - x.o.float()).norm() / x.o.float().norm()).item()
    yield "fla selection", selection if error < 0.02 else f"differs from ours by {error:.3g} of its norm"


def measure(
    session: Session, sizes: Sizes, say: Progress, *, lengths: Sequence[int], kinds: Sequence[str], queries: Sequence[int],
    stages: Sequence[int], rounds: int,
) -> Iterator[Row]:  # fmt: skip
    """Yields the rows of all lengths and kinds of choices.

    Args:
        session: the run.
        sizes: heads, dims and blocks; its number of tokens does not count.
        say: is told what is measured.
        lengths: tokens of the text.
        kinds: the choices, as `KINDS` has them.
        queries: queries of a tile, for the variants.
        stages: stages of a launch, for the variants.
        rounds: how often all take turns.
    """
    clock = clock_for(session.device)
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    short = sizes._replace(N=min(CHECKED_AT, lengths[0]))
    say("checking the variants")
    chosen = variants(sizes.H // sizes.Hk, queries, stages)
    complaints = {one: complaint(one, short, session.device, dtype) for one in chosen}
    for N in lengths:
        for kind in kinds:
            say(f"{kind}, {N:,} tokens")
            x, own = Prepared.of(kind, sizes._replace(N=N), session.device, dtype), sizes._replace(N=N)
            named = {
                "suite": "native-sparse", "case": f"{kind}-{N}", "problem": str(own), "dtype": session.dtype,
                "settings": {"heads": f"{sizes.H},{sizes.Hk}"},
            }  # fmt: skip
            yield from _of_call(session, clock, x, own, rounds, named)
            yield from _of_variants(session, clock, x, own, complaints, rounds, named)


def _of_call(session: Session, clock: Clock, x: Prepared, sizes: Sizes, rounds: int, named: dict[str, Any]) -> Iterator[Row]:
    """The parts of a call beside the peers, forward and backward."""
    q, k, v = (each[None] for each in (x.q, x.k, x.v))
    contest = parts(x, sizes)
    for name, peer in peers(x, sizes):
        if isinstance(peer, str):
            yield timed_row(session, [], backend=name, phase="fwd", reason=peer, **named)
        else:
            contest[name] = (peer, (q, k, v), ("fwd", "bwd"))
    for phase in ("fwd", "bwd"):
        running = {name: step(run, leaves, phase) for name, (run, leaves, phases) in contest.items() if phase in phases}
        for name, samples in take_turns(running, clock, rounds).items():
            yield timed_row(session, samples, roof=_floor(session, name, sizes, phase), backend=name, phase=phase, **named)


def _floor(session: Session, name: str, sizes: Sizes, phase: str) -> Any:
    """The least time of a part, where `rooftile.cost` counts it."""
    heads = {"H": sizes.H, "Hk": sizes.Hk, "D": sizes.D, "Dv": sizes.Dv, "block_size": sizes.block, "count": sizes.count}
    words: dict[str, Any] = {
        "B": 1,
        "T": sizes.N,
        "S": sizes.N,
        **heads,
        "phase": phase,
        "itemsize": 2 if session.dtype == "bf16" else 4,
    }
    branch = {"choice, two walks": "choice", "fla selection": "selected"}.get(name, name)
    if branch in ("choice", *cost.BRANCHES):
        return roof_of(cost.native_sparse_branch(**words, branch=branch), session.ceilings, session.dtype)
    if name == "whole":
        return roof_of(cost.native_sparse(**words), session.ceilings, session.dtype)
    if name in ("exact", "fa4"):
        case = Case(
            name="exact", tags=frozenset(), B=1, T=sizes.N, S=sizes.N, H=sizes.H, Hk=sizes.Hk, dim=sizes.D, mask=CAUSAL,
            dtype=session.dtype,
        )  # fmt: skip
        return roof(case.problem(needs_grad=phase == "bwd"), session.ceilings, phase)
    return None


def _of_variants(
    session: Session, clock: Clock, x: Prepared, sizes: Sizes, complaints: dict[Variant, str | None], rounds: int,
    named: dict[str, Any],
) -> Iterator[Row]:  # fmt: skip
    """The kernels of the selected branch with other tiles, and what making the tiles takes; one size of tiles at a time."""
    for queries in dict.fromkeys(one.queries for one in complaints):
        fine = [one for one, reason in complaints.items() if one.queries == queries and reason is None]
        for one, reason in complaints.items():
            if one.queries == queries and reason is not None:
                yield timed_row(session, [], backend=str(one), phase="fwd", reason=reason, **named)
        if not fine:
            continue
        tiles, lists = x.tiles(fine[0]), x.lists()
        blocks, through = read_bytes(x, tiles)
        contest: dict[tuple[str, str], Callable[[], Any]] = {
            (f"{queries} queries", "tiles"): partial(x.tiles, fine[0]),
            (f"{queries} queries", "lists of keys"): x.lists,
        }
        for one in fine:
            contest |= {(str(one), phase): work for phase, work in works(x, one, tiles, lists).items()}
        for (name, phase), samples in take_turns(contest, clock, rounds).items():
            row = timed_row(session, samples, backend=name, phase=phase, **named)
            yield with_measures(row, union_blocks=blocks, through_l2_bytes=through)
