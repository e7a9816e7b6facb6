"""Target attention of many candidates, over whole histories and over k events, beside PyTorch's gather and a copy of the history.

    BxMxN          B users with M candidates and N events each, 4 heads of 128; k is 100
    training-BxMxN the same, forward and backward of keys and values that are apart
    small          for a CPU

One row a contestant: softmax ("rooftile") and silu over the whole history, the exact search, the search by hashes that were made
before, PyTorch's product, top-k, gather and softmax ("gather"), and a copy of the history's bytes. The roof counts the products
of the pairs that are read, the search's, and each tensor once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.cost import Roof
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile.recommend import simhash, simhash_planes, target_attention
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, refused, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, tidy

GPU = ("1x512x8192", "8x512x8192", "8x512x65536", "training-8x512x8192")
CPU = ("small",)
QUICK = ("8x512x8192",)
HEADS, DIM, BITS, KEPT = 4, 128, 128, 100
# the most that a result may differ from plain operations in fp64, of the largest number
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Problem(NamedTuple):
    """The tensors of a case: users have histories of one length."""

    q: Tensor  # (B, M, H, D)
    keys: Tensor  # (B N, H, D)
    values: Tensor
    cu: Tensor
    hashes: tuple[Tensor, Tensor]  # the candidates' and the events' words
    k: int

    @property
    def pairs(self) -> int:
        B, M, H, _ = self.q.shape
        return M * H * (self.keys.shape[0] // max(B, 1)) * B

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.keys, self.values


Call = Callable[[Problem], Tensor]


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant."""
    clock = clock_for(session.device, 60.0)
    for name in names:
        say(name)
        torch.manual_seed(0)
        problem = problem_of(name, session.device, DTYPES[session.dtype])
        phase = "fwd+bwd" if name.startswith("training") else "fwd"
        why = {who: refusal(call, problem) for who, call in CALLS.items() if who != "lsh"}
        calls = {who: call for who, call in CALLS.items() if not why.get(who)}
        works: dict[str, Any] = {who: partial(run, call, problem, phase) for who, call in calls.items()}
        works["copy"] = partial(copy, torch.empty_like(problem.keys), torch.empty_like(problem.values), problem)
        roofs = {who: roof_of(who, problem, phase, session) for who in works}
        words: dict[str, Any] = {"suite": "target-attention", "case": name, "phase": phase}
        yield from compared(contest(session, works, clock, roofs=roofs, **words)).values()
        yield from refused(session, why, before="refused: ", dtype=session.dtype, **words)
        del problem, works
        tidy(session.device)


def problem_of(name: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """The tensors of a case."""
    heads, dim, k = (2, 16, 8) if name == "small" else (HEADS, DIM, KEPT)
    users, candidates, events = (3, 5, 200) if name == "small" else map(int, name.split("-")[-1].split("x"))
    q = torch.randn(users, candidates, heads, dim, device=device).to(dtype).requires_grad_()
    keys, values = (torch.randn(users * events, heads, dim, device=device).to(dtype).requires_grad_() for _ in range(2))
    planes = simhash_planes(dim, BITS, device=device)
    cu = torch.arange(users + 1, device=device) * events
    return Problem(q, keys, values, cu, (simhash(q.detach(), planes), simhash(keys.detach(), planes)), k)


def softmax(problem: Problem) -> Tensor:
    """Softmax over the whole history."""
    return target_attention(problem.q, problem.keys, problem.cu, values=problem.values)


def silu(problem: Problem) -> Tensor:
    """A function of each score by itself."""
    return target_attention(problem.q, problem.keys, problem.cu, values=problem.values, weights="silu")


def exact(problem: Problem) -> Tensor:
    """Softmax over the k events of the largest scores."""
    return target_attention(problem.q, problem.keys, problem.cu, values=problem.values, top_k=problem.k)


def lsh(problem: Problem) -> Tensor:
    """Softmax over the k events whose hashes are nearest; an event's hash is made once, when it comes."""
    q, keys = problem.hashes
    words: dict[str, Any] = {"search": "lsh", "search_q": q, "search_keys": keys, "top_k": problem.k}
    return target_attention(problem.q, problem.keys, problem.cu, values=problem.values, **words)


def gather(problem: Problem) -> Tensor:
    """PyTorch's operations: all scores, the k largest, copies of their rows, softmax."""
    B, M, H, D = problem.q.shape
    keys, values = (x.view(B, -1, H, D).transpose(1, 2) for x in (problem.keys, problem.values))
    scores = problem.q.transpose(1, 2) @ keys.mT * D**-0.5  # (B, H, M, N)
    top, at = scores.topk(problem.k, -1)
    rows = at.flatten(2)[..., None].expand(-1, -1, -1, D)  # (B, H, M k, D)
    chosen = values.gather(2, rows).unflatten(2, (M, problem.k))
    return (top.softmax(-1)[..., None, :] @ chosen)[..., 0, :].transpose(1, 2)


CALLS: dict[str, Call] = {"rooftile": softmax, "silu": silu, "top-k": exact, "lsh": lsh, "gather": gather}


def copy(keys: Tensor, values: Tensor, problem: Problem) -> None:
    """Copies a history to another place."""
    with torch.no_grad():
        keys.copy_(problem.keys)
        values.copy_(problem.values)


def run(call: Call, problem: Problem, phase: str) -> Any:
    """One forward, or a forward and a backward."""
    if phase == "fwd":
        with torch.no_grad():
            return call(problem)
    o = call(problem)
    return torch.autograd.grad(o, problem.leaves, torch.ones_like(o), allow_unused=True)


def roof_of(who: str, problem: Problem, phase: str, session: Session) -> Roof:
    """The products of the pairs that are read, and of the exact search, and every tensor once."""
    history = problem.keys.nbytes + problem.values.nbytes
    if who == "copy":
        return floor_of(0, 2 * history, session.ceilings, session.dtype)
    B, M, H, D = problem.q.shape
    read = problem.pairs if who in ("rooftile", "silu") else B * M * H * problem.k
    flops = 4 * read * D * (1 if phase == "fwd" else 7) // (1 if phase == "fwd" else 2)
    flops += 2 * problem.pairs * D if who in ("top-k", "gather") else 0
    moved = (history + 2 * problem.q.nbytes) * (1 if phase == "fwd" else 2)
    return floor_of(flops, moved, session.ceilings, session.dtype)


def refusal(call: Call, problem: Problem) -> str:
    """Says how a program's results differ from plain operations in fp64 for some candidates; "" if they do not.

    Equal scores in few bits may be taken in another order, so programs that choose are compared with all events chosen.
    """
    keys, values = problem.keys.detach()[: problem.cu[1]][:KEPT], problem.values.detach()[: problem.cu[1]][:KEPT]
    cu = torch.tensor([0, keys.shape[0]], device=keys.device)
    small = problem._replace(q=problem.q.detach()[:1, :20], keys=keys, values=values, cu=cu, k=keys.shape[0])
    wide = small._replace(q=small.q.double(), keys=keys.double(), values=values.double())
    weights = "silu" if call is silu else "softmax"
    due = target_attention(wide.q, wide.keys, cu, values=wide.values, weights=weights, backend="eager")
    worst = float((call(small).double() - due).abs().max() / due.abs().max())
    bound = CLOSE[problem.q.dtype]
    return "" if worst <= bound else f"o is {worst:.1e} off the definition; may be {bound:.0e}"


def compared(rows: dict[str, Row]) -> dict[str, Row]:
    """The rows with the times of the copy and of the gather over their own."""
    us = times_of(rows)
    beside = {f"of_{other}_ratio": us[other] for other in ("copy", "gather") if other in us}
    found = dict(rows)
    for who in ("rooftile", "silu", "top-k", "lsh"):
        if who in us:
            found[who] = with_measures(rows[who], **{name: other / us[who] for name, other in beside.items()})
    return found
