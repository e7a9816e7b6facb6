"""Functions that each rank runs in the tests of recurrences on split sequences; the tests read what comes back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.runtime.ranks import contiguous
from tests.recurrent.cases import KINDS, Case, front, rand

# sequences of one token, of none, inside of a rank, and across every border
OFFSETS = ((0, 1, 1, 20, 37, 37), (0, 0, 37), (0, 3), (0, 10, 19, 28, 37), (0, 0))
# any lengths will do without offsets, by the number of ranks
LENGTHS = {1: (37,), 2: (0, 37), 3: (20, 0, 17), 4: (2, 0, 35, 0)}
# tensors that every rank holds
SHARED = ("A", "D", "dt_bias", "weight", "bias", "state", "tail", "S", "norm", "largest")


def on_groups(rank: int, ranks: int, function: Any) -> list[Any]:
    """Returns what a function of (rank, group) gives in groups of 1 to `ranks` ranks; None where this rank is in no group."""
    groups = [dist.new_group(range(count)) for count in range(1, ranks + 1)]
    return [function(rank, count, group) if rank < count else None for count, group in enumerate(groups, 1)]


def agreement(rank: int, ranks: int) -> list[Any]:
    """Returns for groups of 1 to 4 ranks the worst difference from one process for each kind of call."""
    return on_groups(rank, ranks, differences)


def differences(rank: int, ranks: int, group: Any) -> list[tuple[str, float]]:
    """Returns the worst difference from one process in fp64: of outputs, last states and all gradients."""
    found = []

    def add(kind: str, T: int, cu: Any = None, **options: Any) -> None:
        name = f"{kind} T={T} cu={cu} {options}"
        found.append((name, difference(rank, ranks, group, kind, T, cu, **options)))

    for kind in CASES:
        for T in (37, 2, 0):
            add(kind, T)
        for cu in OFFSETS:
            add(kind, cu[-1], cu)
        add(kind, 37, lengths=LENGTHS[ranks])
        add(kind, 9, (0, 2, 9), states=False)
    for kind in KINDS:
        add(kind, 9, (0, 2, 9), backend="eager")
    add("ssd", 11, dt_limit=(0.3, 0.9))
    add("conv", 5, K=1)
    return found


def difference(
    rank: int, ranks: int, group: Any, kind: str, T: int, cu: Any, lengths: Any = None, backend: str = "tiled",
    states: bool = True, **options: Any,
) -> float:  # fmt: skip
    torch.manual_seed(0)
    case = CASES[kind](T, cu=None if cu is None else torch.tensor(cu, dtype=torch.int32), **options)
    start, stop = contiguous(T, ranks)[rank] if lengths is None else (sum(lengths[:rank]), sum(lengths[: rank + 1]))
    axis = 0 if cu is not None else 1
    leaves = {name: x.clone().requires_grad_() for name, x in (*case.tensors.items(), *case.given.items())}

    def here(name: str, x: Tensor) -> Tensor:
        return x if name in SHARED else x.narrow(axis, start, stop - start)

    own = {name: here(name, x).detach().clone().requires_grad_() for name, x in leaves.items()}
    split = called(case, own, states=states, backend=backend, group=group)
    due = called(case, leaves, states=states, backend=backend)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, dtype=x.dtype) for x in due]
    # last states are everywhere, and each rank's loss asks for another share of them
    share = (rank + 1) / (ranks * (ranks + 1) / 2)
    parts = [here("", weights[0]), *(share * w for w in weights[1:])]
    # the largest exponent has no gradient
    unused = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(sum((y * w).sum() for y, w in zip(split, parts, strict=True)), list(own.values()), **unused)
    whole = torch.autograd.grad(sum((y * w).sum() for y, w in zip(due, weights, strict=True)), list(leaves.values()), **unused)
    pairs = [(split[0], here("", due[0])), *zip(split[1:], due[1:], strict=True)]
    for name, a, b in zip(own, grads, whole, strict=True):
        if name in SHARED:
            a = a.contiguous()
            dist.all_reduce(a, group=group)
        pairs.append((a, here(name, b)))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1)) if b.numel() else 0.0 for a, b in pairs)


def called(case: Case, tensors: dict[str, Tensor], *, states: bool, **options: Any) -> tuple[Tensor, ...]:
    given = {name: tensors[name] for name in case.given}
    options = {**case.options, **options}
    if case.run in (ap.linear_with_state, ap.performer_with_state):
        run = case.run if states else {ap.linear_with_state: ap.linear, ap.performer_with_state: ap.performer}[case.run]
        sums = tuple(given.values())
        found = run(*(tensors[name] for name in case.tensors), rt.CAUSAL, state=sums, **options)
        return (found[0], *found[1][:2]) if states else (found,)
    keep = {"return_tail" if case.state == "tail" else "return_state": states}
    found = case.run(*(tensors[name] for name in case.tensors), **given, **options, **keep)
    return found if isinstance(found, tuple) else (found,)


def linear(T: int, *, cu: Tensor | None = None, **options: Any) -> Case:
    b, count = front(2, T, cu), 2 if cu is None else len(cu) - 1
    tensors = {"q": rand(*b, 4, 6), "k": rand(*b, 2, 6), "v": rand(*b, 2, 5)}
    given = {"S": rand(count, 2, 6, 5), "norm": rand(count, 2, 6).abs() + 3}
    return Case(ap.linear_with_state, ap.linear, tensors, given, {"cu": cu, **options})


def performer(T: int, *, cu: Tensor | None = None, **options: Any) -> Case:
    b, count = front(2, T, cu), 2 if cu is None else len(cu) - 1
    # exponents that grow and fall along the sequence, so that the largest one changes on every rank
    grow = torch.linspace(0, 12, max(T, 1), dtype=torch.float64)[:T].sin().mul(3)[:, None, None]
    tensors = {"q": rand(*b, 4, 6), "k": rand(*b, 2, 6) * grow, "v": rand(*b, 2, 5)}
    given = {"S": rand(count, 2, 8, 5), "norm": rand(count, 2, 8).abs() + 3, "largest": rand(count, 2)}
    features = ap.Features.draw(6, 8, seed=0)
    return Case(ap.performer_with_state, ap.performer, tensors, given, {"cu": cu, "features": features, **options})


CASES = {**KINDS, "linear": linear, "performer": performer}
