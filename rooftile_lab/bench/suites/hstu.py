"""HSTU attention beside public Triton kernels' way of computing it, beside our softmax attention, and over ragged users.

    bias-BxT       B users of T events, 4 heads of 128, tables of distances and times; times rise by random steps
    plain-BxT      the same without tables; `softmax` is rooftile.attention under CAUSAL, with as many FLOPs; `triton` are the
                   kernels that other GPUs have, where a call takes those for sm90
    ragged-N       users of lognormal lengths, N events in all, with tables; `dense` is one length for as many pairs
    small          for a CPU

`public` is `rooftile_lab.bench.hstu_peer`: the kernels of generative-recommenders, written anew. It is timed after its results
were compared with plain operations in fp64. The roof counts two products per pair and head, and each tensor once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.cost.users import hstu_pairs
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile.recommend import RelativeBias, hstu_attention, time_edges
from rooftile.runtime.devices import arch
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import beside_peers, contest, refused, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, tidy

GPU = ("bias-1x16384", "bias-8x2048", "plain-1x16384", "ragged-65536")
CPU = ("small",)
QUICK = ("bias-1x16384", "plain-1x16384")
HEADS, DIM, COLUMNS, BUCKETS, STEP = 4, 128, 2048, 65, 0.301
# rows on which results are compared
CHECKED = 700
# the most that a result may differ from plain operations in fp64, of the largest number
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
CHECKED_PROGRAMS = ("rooftile", "triton", "public")
Call = Callable[..., Tensor]


class Problem(NamedTuple):
    """The tensors of a case: q, k, v and tables have gradients."""

    leaves: list[Tensor]
    cu: Tensor
    seconds: Tensor
    longest: int

    @property
    def scale(self) -> float:
        """The padded length divides the sum, as in the public kernels."""
        return 1 / self.longest


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    clock = clock_for(session.device, 60.0)
    for name in names:
        say(name)
        torch.manual_seed(0)
        problem = problem_of(name, session.device, DTYPES[session.dtype])
        calls = contestants(name, problem)
        why = {who: refusal(call, checked(problem)) for who, call in calls.items() if who in CHECKED_PROGRAMS}
        calls = {who: call for who, call in calls.items() if not why.get(who)}
        pairs = sum(hstu_pairs(n, 0, 0, rt.CAUSAL) for n in problem.cu.diff().tolist())
        q = problem.leaves[0]
        flops = 4 * pairs * q.shape[1] * q.shape[2]
        roof = floor_of(flops, sum(x.nbytes for x in problem.leaves) + q.nbytes, session.ceilings, session.dtype)
        words: dict[str, Any] = {"suite": "hstu", "case": name}
        for phase in ("fwd", "fwd+bwd"):
            works = {who: partial(run, call, problem, phase) for who, call in calls.items()}
            rows = contest(session, works, clock, roofs=roof if phase == "fwd" else None, phase=phase, **words)
            yield from _compared(beside_peers(rows)).values()
        yield from refused(session, why, before="refused: ", dtype=session.dtype, phase="fwd", **words)
        del problem, calls
        tidy(session.device)


def problem_of(name: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """The tensors of a case."""
    kind, _, size = name.partition("-")
    if kind == "small":
        lengths, heads, dim = torch.tensor([150, 0, 40]), 2, 32
    elif kind == "ragged":
        drawn = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).mul(1.2).add(6.0).exp().long().clamp(1, 16_384)
        lengths = drawn[: int((drawn.cumsum(0) < int(size)).sum())]
        heads, dim = HEADS, DIM
    else:
        users, events = map(int, size.split("x"))
        lengths, heads, dim = torch.full((users,), events), HEADS, DIM
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(cu[-1])
    # seconds to days between events
    seconds = torch.cat([torch.randn(int(n)).mul(2).add(6).exp().long().cumsum(0) for n in lengths])
    q, k, v = (torch.randn(total, heads, dim, device=device).to(dtype).requires_grad_() for _ in range(3))
    tables = [] if kind == "plain" else [torch.randn(n, device=device).mul(0.1).requires_grad_() for n in (COLUMNS, BUCKETS)]
    return Problem([q, k, v, *tables], cu.int().to(device), seconds.to(device), int(lengths.max()))


def contestants(name: str, problem: Problem) -> dict[str, Call]:
    """The programs of a case by their names: functions of the problem."""
    calls: dict[str, Call] = {"rooftile": ours}
    if problem.cu.is_cuda:
        calls["public"] = public
    if name.startswith("plain"):
        calls["softmax"] = softmax
        if arch(problem.cu.device) == "sm90" and problem.leaves[0].dtype == torch.bfloat16:
            calls["triton"] = partial(ours, backend="triton")
    if name.startswith("ragged"):
        pairs = sum(n * (n + 1) // 2 for n in problem.cu.diff().tolist())
        length = int((2 * pairs / max(len(problem.cu) - 1, 1)) ** 0.5)
        other = problem_of(f"bias-{len(problem.cu) - 1}x{length}", problem.cu.device, problem.leaves[0].dtype)
        calls["dense"] = partial(_instead, other)
    return calls


def ours(problem: Problem, backend: str | None = None) -> Tensor:
    """`hstu_attention` of a problem."""
    q, k, v, *tables = problem.leaves
    more: dict[str, Any] = {}
    if tables:
        positions, times = tables
        more = {"bias": RelativeBias(positions, times, time_edges(BUCKETS, "log", STEP)), "times": problem.seconds}
    return hstu_attention(q, k, v, problem.cu, alpha=q.shape[2] ** -0.5, scale=problem.scale, backend=backend, **more)


def public(problem: Problem) -> Tensor:
    """The public kernels' way."""
    from rooftile_lab.bench.hstu_peer import HSTUPeer

    q, k, v, *tables = problem.leaves
    positions, times = tables or (None, None)
    found: Tensor = HSTUPeer.apply(
        q, k, v, positions, times, problem.cu, problem.seconds, problem.longest, q.shape[2] ** -0.5, problem.scale, STEP
    )  # type: ignore[no-untyped-call]
    return found


def softmax(problem: Problem) -> Tensor:
    """Packed softmax attention of the same tensors."""
    q, k, v, *_ = problem.leaves
    return rt.attention_packed(q, k, v, problem.cu, problem.cu, rt.CAUSAL)


def _instead(other: Problem, problem: Problem) -> Tensor:
    return ours(other)


def run(call: Call, problem: Problem, phase: str) -> Any:
    """One forward, or a forward and a backward."""
    if phase == "fwd":
        with torch.no_grad():
            return call(problem)
    y = call(problem)
    leaves = problem.leaves[:3] if call is softmax else problem.leaves
    if isinstance(call, partial) and call.args:
        leaves = call.args[0].leaves
    return torch.autograd.grad(y, leaves, torch.ones_like(y))


def checked(problem: Problem) -> Problem:
    """The first rows of a problem, as users of their own."""
    rows = min(CHECKED, len(problem.seconds))
    leaves = [x.detach()[:rows].requires_grad_() for x in problem.leaves[:3]]
    tables = [x.detach().requires_grad_() for x in problem.leaves[3:]]
    cu = problem.cu.clamp(max=rows).unique()
    return Problem([*leaves, *tables], cu, problem.seconds[:rows], int(cu.diff().max()))


def refusal(call: Call, problem: Problem) -> str:
    """Says how a program's results differ from plain operations in fp64; "" if they do not."""
    exact = problem._replace(leaves=[x.detach().double().requires_grad_() for x in problem.leaves])
    due = [ours(exact, "eager"), *run(partial(_eager, exact), exact, "fwd+bwd")]
    found = [call(problem), *run(call, problem, "fwd+bwd")]
    bound = CLOSE[problem.leaves[0].dtype]
    for name, x, y in zip(("y", "dq", "dk", "dv", "positions", "times"), found, due, strict=False):
        # a bucket of fp32 may differ from the exact one at an edge
        worst = float((x.double() - y).detach().abs().max() / y.detach().abs().max())
        if not worst <= bound:
            return f"{name} is {worst:.1e} off the definition; may be {bound:.0e}"
    return ""


def _eager(exact: Problem, problem: Problem) -> Tensor:
    return ours(exact, "eager")


def _compared(rows: dict[str, Row]) -> dict[str, Row]:
    """The rows with our times beside softmax's, the public kernels', and ragged users' beside dense ones'."""
    found = dict(rows)
    for ours_is in ("rooftile", "triton"):
        mine = rows.get(ours_is)
        if mine is None or mine.median_us is None:
            continue
        for who in ("softmax", "dense", "public"):
            other = rows.get(who)
            if other is not None and other.median_us is not None:
                mine = with_measures(mine, **{f"of_{who}_ratio": other.median_us / mine.median_us})
        found[ours_is] = mine
    return found
