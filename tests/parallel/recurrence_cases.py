"""Functions that each rank runs in the tests of recurrences on split sequences; the tests read what comes back."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.runtime.ranks import contiguous
from tests.recurrent.cases import KINDS, Case

# sequences of one token, of none, inside of a rank, and across every border
OFFSETS = ((0, 1, 1, 20, 37, 37), (0, 0, 37), (0, 3), (0, 10, 19, 28, 37), (0, 0))


def agreement(rank: int, ranks: int) -> list[tuple[str, float]]:
    """Returns the worst difference from one process in fp64 for each kind of call: outputs, states and all gradients."""
    found = []
    for kind, cu in product(KINDS, (None, *OFFSETS)):
        for T in (37, 2, 0) if cu is None else (cu[-1],):
            found.append((f"{kind} T={T} cu={cu}", difference(rank, ranks, kind, T, cu)))
    for kind in KINDS:
        found.append((f"{kind} any lengths", difference(rank, ranks, kind, 37, None, lengths=(0, 20, 0, 17)[:ranks])))
        found.append((f"{kind} eager", difference(rank, ranks, kind, 9, (0, 2, 9), backend="eager")))
        found.append((f"{kind} no states", difference(rank, ranks, kind, 9, (0, 2, 9), states=False)))
    found.append(("ssd clamped", difference(rank, ranks, "ssd", 11, None, dt_limit=(0.3, 0.9), softplus=True)))
    found.append(("conv K=1", difference(rank, ranks, "conv", 5, None, sizes={"K": 1})))
    return found


def difference(
    rank: int, ranks: int, kind: str, T: int, cu: Any, lengths: Any = None, backend: str = "tiled", states: bool = True,
    sizes: Any = None, **options: Any,
) -> float:  # fmt: skip
    torch.manual_seed(0)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    case = KINDS[kind](T, cu=offsets, **(sizes or {}), **options)
    if lengths is None or sum(lengths) < T:
        start, stop = contiguous(T, ranks)[rank]
    else:
        start, stop = sum(lengths[:rank]), sum(lengths[: rank + 1])
    leaves = {name: x.clone().requires_grad_() for name, x in (*case.tensors.items(), *case.given.items())}
    own = {
        name: (part_of(x, T, start, stop, case, name, cu) if is_token(name, kind) else x).detach().clone().requires_grad_()
        for name, x in leaves.items()
    }
    keep = "return_tail" if kind == "conv" else "return_state"
    found, due = (
        called(case, tensors, **{keep: states}, backend=backend, **more)
        for tensors, more in ((own, {"group": dist.group.WORLD}), (leaves, {}))
    )
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, dtype=x.dtype) for x in due]
    axis = 0 if cu is not None else 1
    # the last states are everywhere, and each rank's loss asks for a share of them
    parts = [weights[0].narrow(axis, start, stop - start), *((rank + 1) / (ranks * (ranks + 1) / 2) * w for w in weights[1:])]
    grads = torch.autograd.grad(sum((y * w).sum() for y, w in zip(found, parts, strict=True)), list(own.values()))
    whole = torch.autograd.grad(sum((y * w).sum() for y, w in zip(due, weights, strict=True)), list(leaves.values()))
    pairs = [(found[0], due[0].narrow(axis, start, stop - start)), *zip(found[1:], due[1:], strict=True)]
    for name, a, b in zip(own, grads, whole, strict=True):
        if is_token(name, kind):
            b = b.narrow(axis, start, stop - start)
        else:
            dist.all_reduce(a)
        pairs.append((a, b))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) if b.numel() else 0.0 for a, b in pairs)


def is_token(name: str, kind: str) -> bool:
    return name not in ("A", "D", "dt_bias", "state", "tail", "weight", "bias")


def part_of(x: Tensor, T: int, start: int, stop: int, case: Case, name: str, cu: Any) -> Tensor:
    return x.narrow(0 if cu is not None else 1, start, stop - start)


def called(case: Case, tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    given = {name: tensors[name] for name in case.given}
    found = case.run(*(tensors[name] for name in case.tensors), **given, **{**case.options, **options})
    return found if isinstance(found, tuple) else (found,)
