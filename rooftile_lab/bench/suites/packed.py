"""Packed sequences, and groups of query heads, beside a dense batch with as many heads: forward and backward.

Every problem has 16,384 tokens and 2,048 / D heads. Dense is two sequences of 8,192. Packed lengths are drawn between 64 and
8,192 from two fixed seeds. `of_dense_ratio` is the TFLOP/s over the dense batch's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rooftile.cost import roof
from rooftile.cost.session import Session
from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL, FULL
from rooftile.hardware.clock import Work, clock_for
from rooftile_lab.bench.peers import provider_named
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, with_measures
from rooftile_lab.bench.run import Progress, timed_work, words_of

GPU = tuple(f"d{dim}-{mask}" for dim in (64, 128, 256) for mask in ("full", "causal"))
CPU = ("tiny-d64-causal",)
QUICK = ("d128-causal",)


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each problem and phase; its case is the suite's case and the problem's kind, as in "d64-full-packed-0"."""
    for name in names:
        cases = problems(name)
        for phase in ("fwd", "bwd"):
            say(f"{name}: {phase}")
            works = {kind: work(session, case, phase) for kind, case in cases.items()}
            floors = {
                kind: roof(case.problem(session.machine.arch, needs_grad=phase == "bwd"), session.ceilings, phase)
                for kind, case in cases.items()
            }
            rows = contest(
                session, works, clock_for(session.device), dtype="bf16", roofs=floors, suite="packed", case=name, phase=phase
            )
            for kind, row in rows.items():
                case = cases[kind]
                named = replace(row, case=case.name, backend="rooftile", problem=words_of(case.problem(session.machine.arch)))
                yield with_measures(named, of_dense_ratio=(row.tflops or 0.0) / (rows["dense"].tflops or 1.0))


def problems(name: str) -> dict[str, Case]:
    """The contestants of a case by kind. "tiny-" takes a 64th of the tokens and an eighth of the heads."""
    *tiny, dim, mask = name.split("-")
    tokens, width = (256, 256) if tiny else (16_384, 2048)
    size = int(dim[1:])
    heads = width // size
    halves = (tokens // 2,) * 2
    kinds: dict[str, tuple[tuple[int, ...], int]] = {"dense": (halves, 1), "group-4": (halves, 4), "group-8": (halves, 8)}
    kinds |= {f"packed-{seed}": (packed_lengths(seed, tokens), 1) for seed in (0, 1)}
    found = {}
    for kind, (lengths, group) in kinds.items():
        sizes: dict[str, Any] = {"B": 2, "T": tokens // 2, "S": tokens // 2}
        if kind.startswith("packed"):
            sizes = {"lengths": tuple((n, n) for n in lengths)}
        found[kind] = Case(
            name=f"{name}-{kind}", tags=frozenset(), H=heads, Hk=max(heads // group, 1), dim=size, dtype="bf16",
            mask=CAUSAL if mask == "causal" else FULL, **sizes,
        )  # fmt: skip
    return found


def packed_lengths(seed: int, tokens: int) -> tuple[int, ...]:
    """Lengths between 64 and half of the tokens, which they add up to; the last one may be shorter."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(64, tokens // 2), tokens - sum(lengths)))
    return tuple(lengths)


def work(session: Session, case: Case, phase: str) -> Work:
    """A phase of one problem on random tensors."""
    inputs = case.inputs(session.device, requires_grad=phase == "bwd")
    forward = provider_named("rooftile").prepare(case, inputs)
    return timed_work(forward, inputs, torch.randn_like(inputs.tensors[0]), phase)
