"""Predicts the time of attention on split sequences by each method, and says which to take and why.

The attention of a rank takes its share of one device's time. A transfer adds what no attention hides:

    gather     the first of its groups of heads, and in the backward the last group's gradients
    ulysses    everything
    usp        the exchange of heads within a row, and what a ring or, for usp-gather, a gather between rows adds
    ring       what a hop takes beyond the attention to the keys that are there, and the gradients' way home

Copies before and behind a transfer, and the merges of a ring, move their bytes at the memory's rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from rooftile.cost.flops import count as flops_of
from rooftile.cost.roofline import Machine
from rooftile.errors import InvalidInput
from rooftile.exact.spec import DTYPE_NAMES, Problem, Sizes, Spec
from rooftile.hardware.chips import Chip, chip_named
from rooftile.hardware.link import Link
from rooftile.parallel.gathered import groups_of
from rooftile.parallel.layouts import check_layout
from rooftile.parallel.loads import advice, loads, shares
from rooftile.parallel.memory import Memory
from rooftile.parallel.pieces import Share
from rooftile.parallel.traffic import WIDE_BYTES, Sequence, bytes_sent

PHASES = ("fwd", "bwd", "fwd+bwd")
# the share of the matrix rate that attention reaches on long sequences: d128-causal-16k of benchmarks/results/h200-hopper.jsonl
REACHED = {"fwd": 0.89, "bwd": 0.755}
# a chip's measured matrix rate over its datasheet's, from the same lines
OF_DATASHEET = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A method's prediction for the rank that has most to do."""

    method: str
    time_us: float
    attention_us: float
    exposed_us: float  # transfers that no attention hides
    copies_us: float
    bytes_sent: int
    memory_bytes: int  # beyond this rank's own q, k, v, o and their gradients

    def __str__(self) -> str:
        return (
            f"{self.method}: {self.time_us / 1e3:.3g} ms, of which {self.exposed_us / 1e3:.3g} ms wait for the link; "
            f"sends {self.bytes_sent / 2**20:.4g} MiB, holds {self.memory_bytes / 2**20:.4g} MiB more"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The method to take, with all estimates, the fastest first, and the reasons of the methods that cannot run."""

    method: str
    ranks: int
    one_us: float  # the time of one device
    why: str
    estimates: tuple[Estimate, ...]
    refusals: tuple[tuple[str, str], ...] = ()
    memories: tuple[Memory, ...] = ()  # lines beside it: a loss over ranks, tiles, offload

    @property
    def chosen(self) -> Estimate:
        """The estimate of the method to take."""
        return next(each for each in self.estimates if each.method == self.method)

    def __str__(self) -> str:
        lines = [f"{self.ranks} ranks, {self.one_us / 1e3:.3g} ms on one", *map(str, self.estimates)]
        lines += [f"{method}: {reason}" for method, reason in self.refusals]
        return "\n".join([*lines, self.why, *map(str, self.memories)])


def plan(
    problem: Problem, ranks: int | tuple[int, int], link: Link | tuple[Link, Link], machine: Machine, *,
    layout: str = "zigzag", phase: str = "fwd", one_us: float | None = None, most_bytes: float = float("inf"),
    memories: Iterable[Memory] = (),
) -> Plan:  # fmt: skip
    """Returns the predicted time, bytes and memory of each method, and the method to take.

    Args:
        problem: self-attention over the whole sequence, dense or packed.
        ranks: the number of ranks; or of rows and of ranks in a row, for the methods of a mesh of two dimensions.
        link: `rooftile.hardware.link.measure(group, device)`, or its numbers from elsewhere; or of both dimensions.
        machine: measured ceilings, or a datasheet's `Chip`.
        layout: "zigzag", "contiguous", or "balanced" for packed documents.
        phase: "fwd", "bwd" (the backward alone) or "fwd+bwd".
        one_us: the time of one device, if it is known; else it follows from FLOPs and the matrix rate.
        most_bytes: memory that a method may take.
        memories: lines of `rooftile.parallel.memory` for a loss over ranks, tiles and offload; the plan prints them, too.

    Example:
        >>> print(plan(CASES["d128-causal-16k"].problem("sm90"), 2, Link(ranks=2, gbs=350, latency_us=20), chip_named("H200")))
    """
    if phase not in PHASES:
        raise InvalidInput(f"phase is {phase!r}; must be one of {', '.join(map(repr, PHASES))}")
    check_layout(layout, bool(problem.sizes.lengths))
    if any(queries != keys for queries, keys in problem.sizes.sequences):
        raise InvalidInput(f"the problem has {problem.sizes.T} queries and {problem.sizes.S} keys; a split sequence has as many")
    grid = ranks if isinstance(ranks, tuple) else (1, ranks)
    if len(grid) != 2 or min(grid) < 1:
        raise InvalidInput(f"ranks is {ranks}; must be at least 1, or rows and ranks in a row for a mesh of two dimensions")
    count, inner = grid[0] * grid[1], grid[1] if isinstance(ranks, tuple) else 0
    links = link if isinstance(link, tuple) else (link, link)
    sequence = _sequence(problem, count, inner, layout)
    rates = machine.rates(DTYPE_NAMES[problem.spec.dtype])
    phases = tuple(phase.split("+"))
    flops_per_us = rates.flops_per_s * (OF_DATASHEET if isinstance(machine, Chip) else 1.0) / 1e6
    predicted = sum(flops_of(problem, each) / flops_per_us / REACHED[each] for each in phases)
    one = predicted if one_us is None else one_us
    # the backward's part, where both are given as one time
    parts = {each: one * flops_of(problem, each) / REACHED[each] for each in phases}
    parts = {each: one * part / sum(parts.values()) if one else 0.0 for each, part in parts.items()}
    refusals = tuple(_refusals(sequence, problem))
    refused = {method for method, _ in refusals}
    bytes_per_us = rates.bytes_per_s / 1e6
    if inner:
        found = [
            _of_grid(method, sequence, links, bytes_per_us, parts) for method in ("usp-gather", "usp") if method not in refused
        ]
    else:
        model = _Model(sequence, shares(sequence), links[0], bytes_per_us, parts)
        found = [model.estimate(method) for method in ("gather", "ulysses", "ring") if method not in refused]
    if not found:
        raise InvalidInput(f"no method runs on {grid[0]} rows of {inner} ranks: {refusals[0][1]}")
    found.sort(key=lambda each: each.time_us)
    fitting = [each for each in found if each.memory_bytes <= most_bytes] or [min(found, key=lambda each: each.memory_bytes)]
    return Plan(
        method=fitting[0].method, ranks=count, one_us=one, why=_why(fitting[0], found, one, count) + advice(sequence),
        estimates=tuple(found), refusals=refusals, memories=tuple(memories),
    )  # fmt: skip


def _of_grid(method: str, sequence: Sequence, links: tuple[Link, ...], bytes_per_us: float, one_us: dict[str, float]) -> Estimate:
    """A mesh of two dimensions: heads are exchanged within a row, then keys travel between rows."""
    U, rows = sequence.inner, sequence.ranks // sequence.inner
    between = sequence.between
    part = {phase: us / U for phase, us in one_us.items()}
    found = _Model(between, shares(sequence), links[0], bytes_per_us, part).estimate("ring" if method == "usp" else "gather")
    within = _Model(
        replace(sequence, tokens=-(-sequence.tokens // rows), ranks=U, cu=None, layout="contiguous", inner=0), [], links[1],
        bytes_per_us, one_us,
    )  # fmt: skip
    exchanges = [within._ulysses(phase, 0.0) for phase in one_us]
    exposed = found.exposed_us + (sum(waits for waits, _ in exchanges) if U > 1 else 0.0)
    copies = found.copies_us + sum(moved for _, moved in exchanges) / bytes_per_us
    return replace(
        found, method=method, time_us=found.attention_us + exposed + copies, exposed_us=exposed, copies_us=copies,
        bytes_sent=sum(bytes_sent(method, sequence, phase) for phase in one_us),
        memory_bytes=found.memory_bytes + within._memory("ulysses"),
    )  # fmt: skip


def _sequence(problem: Problem, ranks: int, inner: int, layout: str) -> Sequence:
    spec, sizes = problem.spec, problem.sizes
    cu = (0, *accumulate(keys for _, keys in sizes.lengths)) if sizes.lengths else None
    return Sequence(
        tokens=sizes.T, ranks=ranks, mask=spec.mask, H=sizes.H, Hk=sizes.Hk, D=spec.dim, Dv=spec.dim_v,
        B=1 if cu else sizes.B, itemsize=spec.dtype.itemsize, layout=layout, cu=cu,
        inner=inner,
    )  # fmt: skip


def _refusals(s: Sequence, problem: Problem) -> Iterator[tuple[str, str]]:
    P = s.inner or s.ranks
    for method in ("usp-gather", "usp") if s.inner else ("ulysses",):
        if s.H % P or (s.Hk % P and P % s.Hk):
            yield method, f"{s.H} query heads and {s.Hk} key heads cannot be dealt out to {P} ranks"
        elif problem.spec.has_bias:
            yield method, "a bias has the rows of a rank; it needs all rows"


def _why(chosen: Estimate, found: list[Estimate], one_us: float, ranks: int) -> str:
    others = ", ".join(f"{each.method} {each.time_us / 1e3:.3g} ms" for each in found if each is not chosen)
    speed = one_us / ranks / chosen.time_us if chosen.time_us else 1.0
    fastest = "is the fastest" if chosen is found[0] else "is the fastest that fits in memory"
    beside = f" beside {others}" if others else ""
    return (
        f"{chosen.method} {fastest} with {chosen.time_us / 1e3:.3g} ms{beside}: {100 * speed:.0f} % of {ranks} times one device, "
        f"since {chosen.exposed_us / 1e3:.3g} ms of transfers are not hidden"
    )


@dataclass(frozen=True, slots=True)
class _Model:
    sequence: Sequence
    shares: list[Share]
    link: Link
    bytes_per_us: float
    one_us: dict[str, float]  # by phase

    def estimate(self, method: str) -> Estimate:
        part = (1.0 if method == "ulysses" else max(loads(self.shares))) / self.sequence.ranks
        attention = sum(self.one_us.values()) * part
        exposed = copies = 0.0
        for phase in self.one_us:
            waits, moved = getattr(self, f"_{method}")(phase, self.one_us[phase] * part)
            exposed += waits
            copies += moved / self.bytes_per_us
        if self.sequence.ranks == 1:
            exposed = 0.0
        return Estimate(
            method=method, time_us=attention + exposed + copies, attention_us=attention, exposed_us=exposed, copies_us=copies,
            bytes_sent=sum(bytes_sent(method, self.sequence, phase) for phase in self.one_us), memory_bytes=self._memory(method),
        )  # fmt: skip

    @property
    def _keys(self) -> int:
        """Elements of a token's key and value."""
        return self.sequence.B * self.sequence.Hk * (self.sequence.D + self.sequence.Dv)

    @property
    def _rows(self) -> int:
        """Elements of a rank's o."""
        return self.sequence.B * max(map(self.sequence.held, range(self.sequence.ranks))) * self.sequence.H * self.sequence.Dv

    def _gather(self, phase: str, attention_us: float) -> tuple[float, float]:
        s, exchange = self.sequence, self.shares[0].exchange
        fetched, buffer = exchange.most_fetched * self._keys, max(share.exchange.buffer for share in self.shares) * self._keys
        groups = groups_of(exchange.most_fetched, s.Hk, self._keys // s.Hk * s.itemsize)
        waits = self.link.time_us(fetched * s.itemsize / groups)
        # packed, laid out, and rows put into o or dq
        moved = 2 * s.itemsize * (fetched + buffer + self._rows)
        if phase == "bwd":
            waits += self.link.time_us(fetched * WIDE_BYTES / groups)
            # packed, added to what is there, rounded
            moved += WIDE_BYTES * (2 * fetched + 5 * s.tokens // s.ranks * self._keys + self._rows)
        return waits, moved

    def _ulysses(self, phase: str, attention_us: float) -> tuple[float, float]:
        sent = bytes_sent("ulysses", self.sequence, phase)
        # q, k, v, o and lse, each packed and laid out
        return self.link.time_us(sent, 5), 4.0 * sent * self.sequence.ranks / max(self.sequence.ranks - 1, 1)

    def _ring(self, phase: str, attention_us: float) -> tuple[float, float]:
        s = self.sequence
        hop = self._keys * -(-s.tokens // s.ranks)
        sent = hop * (s.itemsize + (WIDE_BYTES if phase == "bwd" else 0))
        waits = (s.ranks - 1) * max(self.link.time_us(sent) - attention_us / s.ranks, 0.0)
        merges = s.ranks * self._rows * WIDE_BYTES
        if phase == "bwd":
            # gradients go home, and each hop adds to dq and to its keys' gradients
            return waits + self.link.time_us(hop * WIDE_BYTES), 3.0 * merges + 3 * s.ranks * hop * WIDE_BYTES
        return waits, 3.0 * merges

    def _memory(self, method: str) -> int:
        s, back = self.sequence, "bwd" in self.one_us
        own = -(-s.tokens // s.ranks)
        if method == "gather":
            exchange = self.shares[0].exchange
            buffer = max(share.exchange.buffer for share in self.shares)
            return self._keys * ((buffer + 2 * exchange.most_fetched) * s.itemsize + back * (buffer + own) * WIDE_BYTES)
        if method == "ulysses":
            return (
                2 * (s.itemsize * (own * s.B * s.H * (s.D + s.Dv) + max(s.Hk, s.ranks) * own * self._keys // s.Hk)) * (1 + back)
            )
        return self._keys * own * (2 * s.itemsize + 3 * back * WIDE_BYTES) + self._rows * WIDE_BYTES


def planned(
    sequence: Sequence, spec: Spec, link: Link | tuple[Link | None, ...] | None, device_name: str, *, needs_grad: bool,
    device_bytes: int,
) -> Plan | None:  # fmt: skip
    """Returns the plan that `method="auto"` follows where chip and links are known; None elsewhere.

    A method may take a quarter of the device's memory. Every rank of equal devices gets the same.
    """
    chip = chip_named(device_name)
    links = tuple(each for each in (link if isinstance(link, tuple) else (link,)) if each is not None)
    if len(links) < (2 if sequence.inner else 1) or chip is None or spec.dtype not in (torch.bfloat16, torch.float16):
        return None
    return _planned(sequence, spec, links, chip, "fwd+bwd" if needs_grad else "fwd", device_bytes / 4)


@lru_cache(maxsize=256)
def _planned(s: Sequence, spec: Spec, links: tuple[Link, ...], chip: Chip, phase: str, most_bytes: float) -> Plan:
    lengths = () if s.cu is None else tuple((b - a, b - a) for a, b in pairwise(s.cu))
    sizes = Sizes(B=len(lengths) or s.B, T=s.tokens, S=s.tokens, H=s.H, Hk=s.Hk, lengths=lengths)
    ranks = (s.ranks // s.inner, s.inner) if s.inner else s.ranks
    given = (links[0], links[-1])
    return plan(Problem(spec=spec, sizes=sizes), ranks, given, chip, layout=s.layout, phase=phase, most_bytes=most_bytes)
