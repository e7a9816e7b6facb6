"""Approximate methods beside exact attention and beside other libraries' programs for them.

    METHOD-N, METHOD-BxN     a method, or a branch of Native Sparse Attention, on B texts of N tokens

In bf16 on a GPU with head dim 128 and the heads of `rooftile_lab.bench.methods.table`, in fp32 on a CPU with head dim 64 and a
quarter of them. `exact` is `rooftile.attention` on the same q, k and v, under CAUSAL, or FULL for Linformer; for Loki paged
decoding. Times include what a method chooses or projects in its call, not a model's projections; a branch of Native Sparse
Attention gets its compressed keys and chosen blocks.

`of_exact_ratio` is the speed over exact attention's. `counted_flops` and `compulsory_bytes` come from `rooftile.cost`. The
error is against the definition in fp64 at a small length, under equal choices. A peer is checked first, gradients too, and has a
row that says why, where it is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rooftile.cost import Roof
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import Clock, Work, clock_for
from rooftile_lab.bench.methods.check import Check, Run
from rooftile_lab.bench.methods.peers import OTHERS, peers_of
from rooftile_lab.bench.methods.table import WAYS, sizes_of
from rooftile_lab.bench.methods.way import Sizes, Way, drawn_for, exact_roof, roof_of
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, refused, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import step, tidy, words_of_error

ROUNDS = 4
_LENGTHS = ("2k", "8k", "16k", "64k")
_BRANCHES = ("nsa-choice", "nsa-selected", "nsa-compressed", "nsa-near")
GPU = (
    *(f"{name}-{length}" for name in ("linear", "performer", "linformer", "strided", "fixed") for length in _LENGTHS),
    *(f"{name}-{length}" for name in ("reformer", "routing", "nsa", "nsa-groups-of-4") for length in _LENGTHS),
    "linear-8x2k", "linear-sums-16k", "linear-sums-8x2k", "loki-8x32k", "loki-8x128k",
    *(f"{name}-{length}" for name in _BRANCHES for length in ("8k", "64k")),
)  # fmt: skip
CPU = (*(f"{name}-512" for name in WAYS if name != "loki"), "linear-2x256", "loki-2x512")
QUICK = (
    "linear-16k", "performer-16k", "linformer-64k", "strided-16k", "fixed-16k", "reformer-16k", "routing-16k", "nsa-64k",
    "loki-8x128k",
)  # fmt: skip


@dataclass(slots=True)
class _Contest:
    """The contestants of one case: what is timed, what is known of it, and why others are not."""

    works: dict[str, Work] = field(default_factory=dict)
    roofs: dict[str, Roof] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields of their rows
    reasons: dict[str, str] = field(default_factory=dict)


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    clock, dtype = clock_for(session.device), DTYPES[session.dtype]
    checks: dict[str, Check] = {}
    for name in names:
        way, sizes = parsed(name, session.device.type)
        if way.name not in checks:
            say(f"{name}: the definition")
            # one at a time: its tensors stay on the device
            checks = {way.name: Check(way, session.device, dtype)}
        say(name)
        for phase in way.phases:
            yield from _phase(session, clock, name, way, sizes, phase, checks[way.name])
        tidy(session.device)


def parsed(name: str, kind: str) -> tuple[Way, Sizes]:
    """The way and the sizes of a case's name."""
    way, _, shape = name.rpartition("-")
    batch, _, length = shape.rpartition("x")
    N = int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)
    return WAYS[way], sizes_of(WAYS[way], kind, N, int(batch or 1))


def _phase(session: Session, clock: Clock, name: str, way: Way, sizes: Sizes, phase: str, check: Check) -> Iterator[Row]:
    """The rows of a case in one phase, those that are not timed last."""
    it = contestants(session, clock, way, sizes, phase, check)
    named: dict[str, Any] = {"suite": "approximate", "case": name, "phase": phase}
    named |= {"dtype": session.dtype, "problem": words(way, sizes)}
    rows = contest(session, it.works, clock, rounds=ROUNDS, roofs=it.roofs, **named)
    us = times_of(rows)
    for backend, row in rows.items():
        roof = it.roofs[backend]
        yield with_measures(
            replace(row, **it.facts[backend]), of_exact_ratio=us["exact"] / us[backend], counted_flops=roof.flops,
            compulsory_bytes=roof.bytes_moved,
        )  # fmt: skip
    yield from refused(session, it.reasons, **named)


def contestants(session: Session, clock: Clock, way: Way, sizes: Sizes, phase: str, check: Check) -> _Contest:
    """Ours, exact attention, and each peer that runs here and passes."""
    it = _Contest()
    q, k, v = drawn_for(phase, sizes, session.device, DTYPES[session.dtype])
    x = way.tensors(q, k, v)
    roof = roof_of(way.cost(sizes, phase, q.element_size()), session.ceilings, session.dtype)
    runs: dict[str, Run] = {"rooftile": way.run}
    for peer in peers_of(way):
        reason = peer.reason(session.device)
        if reason is None:
            runs[peer.name] = peer.make(way)
        else:
            it.reasons[peer.name] = f"refused: {reason}"
    if way.name in OTHERS:
        peer_name, reason = OTHERS[way.name]
        it.reasons[peer_name] = reason
    for name, run in runs.items():

        def forward(*leaves: Tensor, run: Run = run) -> Tensor:
            return run(x._replace(leaves=leaves))

        try:
            errors = check.errors(run)
            complaint = check.complaint(errors)
            if complaint is None:
                _join(it, name, forward, x.leaves, phase, roof, clock, error=errors[phase])
        except Exception as error:
            # a peer is another's program, and a table should not end at the first that fails; ours must not
            if name == "rooftile":
                raise
            complaint = f"failed: {words_of_error(error, 300)}"
        if complaint is not None:
            it.reasons[name] = complaint
    roof = exact_roof(way, sizes, phase, session.ceilings, session.dtype)
    _join(it, "exact", way.exact_for(k, v), (q, k, v), phase, roof, clock)
    return it


def _join(
    it: _Contest, name: str, forward: Callable[..., Tensor], leaves: tuple[Tensor, ...], phase: str, roof: Roof, clock: Clock,
    **facts: Any,
) -> None:  # fmt: skip
    """Adds a contestant. Its call runs here for the first time; peak memory in the backward is a whole step's."""
    work = step(forward, leaves, phase)
    work()

    def whole() -> object:
        return step(forward, leaves, phase)()

    peak = clock.peak_bytes(whole)
    it.works[name], it.roofs[name] = work, roof
    it.facts[name] = facts | {"peak_bytes": peak, "peak_kind": clock.peak_kind}


def words(way: Way, sizes: Sizes) -> str:
    """The problem in words."""
    settings = ", ".join(f"{name} {value}" for name, value in vars(way).items() if name not in ("name", "heads"))
    B, N, H, Hk, D = sizes
    return f"{way.name}{' with ' * bool(settings)}{settings}, B {B} N {N} H {H} Hk {Hk} D {D}"
