"""Functions that each of two GPUs runs over NCCL in the tests of split sequences; the tests read what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import rooftile as rt
from rooftile import approximate as ap
from rooftile import recurrent as rec
from rooftile.exact.masks import CAUSAL, Mask, Window
from rooftile.parallel import context_attention, shard
from rooftile.runtime.ranks import contiguous

RANKS = 2
# documents inside of a rank, and across the border
OFFSETS = (0, 1, 250, 813, 1000)
# errors against fp64: name, of the split call, of one GPU
Errors = list[tuple[str, float, float]]


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def attention(rank: int) -> Errors:
    """Returns the errors of o and the gradients by every method, over one group and over meshes of two dimensions."""
    found: Errors = []
    meshes = {"usp rows of 2": init_device_mesh("cuda", (1, 2)), "usp rows of 1": init_device_mesh("cuda", (2, 1))}
    ways: list[tuple[str, Any]] = [
        ("gather", None),
        ("ulysses", None),
        ("ring", None),
        *((name, mesh) for name, mesh in meshes.items()),
    ]
    for mask, cu in ((CAUSAL, None), (CAUSAL & Window(100), OFFSETS)):
        T = 1000
        outer = (T,) if cu else (1, T)
        q, k, v, do = (rand(*outer, heads, 128, seed=n) for n, heads in enumerate((8, 2, 2, 8)))
        exact = _one(*(x.double() for x in (q, k, v, do)), mask, cu)
        alone = _one(q, k, v, do, mask, cu)
        axis = len(outer) - 1
        for name, group in ways:
            for method in ("usp", "usp-gather") if name.startswith("usp") else (name,):
                own = [shard(x, group, axis).requires_grad_() for x in (q, k, v)]
                offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
                o = context_attention(*own, mask, group=group, method=method, cu=offsets, tokens=T)
                got = [o.detach(), *torch.autograd.grad(o, own, shard(do, group, axis))]
                for word, a, b, c in zip(("o", "dq", "dk", "dv"), got, alone, exact, strict=True):
                    b, c = (shard(x, group, axis) for x in (b, c))
                    found.append((f"{name} {method} {mask} {word}", error(a, c), error(b, c)))
    return found


def _one(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, cu: tuple[int, ...] | None) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    backend = "eager" if q.dtype == torch.float64 else None
    if cu is None:
        o = rt.attention(*leaves, mask, backend=backend)
    else:
        offsets = torch.tensor(cu, dtype=torch.int32, device="cuda")
        o = rt.attention_packed(*leaves, offsets, offsets, mask, backend=backend)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def decays(*shape: int) -> Tensor:
    return -torch.rand(*shape, generator=torch.Generator().manual_seed(1)).cuda() - 0.1


# the function, its tensors for T tokens, and the tensors that every rank holds whole
def recurrence(kind: str, T: int) -> tuple[Callable[..., Any], list[Tensor], tuple[int, ...]]:
    if kind == "ssd":
        return rec.ssd, [rand(T, 64, 64), rand(T, 64), decays(64), rand(T, 1, 128), rand(T, 1, 128, seed=1)], (2,)
    if kind == "selective_scan":
        return rec.selective_scan, [rand(T, 256), rand(T, 256, seed=2), decays(256, 16), rand(T, 16), rand(T, 16, seed=1)], (2,)
    if kind == "causal_conv":
        return rec.causal_conv, [rand(T, 256), rand(256, 4)], (1,)
    if kind == "linear":
        return _linear, [rand(T, 4, 64), rand(T, 4, 64, seed=1), rand(T, 4, 64, seed=2)], ()
    gates = [-rand(T, 32).abs() * 0.1, rand(T, 32, seed=3).sigmoid()]
    return rec.gated_delta, [rand(T, 16, 128), rand(T, 16, 128, seed=1), rand(T, 32, 128), *gates], ()


def _linear(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return ap.linear_with_state(q, k, v, CAUSAL, **options)


def recurrences(rank: int, kind: str, ways: tuple[dict[str, Any], ...]) -> Errors:
    """Returns the errors of y, of the last state and of all gradients; dense and packed."""
    found: Errors = []
    for cu in (None, OFFSETS):
        T = 1000
        function, tensors, shared = recurrence(kind, T)
        axis = 0 if cu else 1
        offsets = {} if cu is None else {"cu": torch.tensor(cu, dtype=torch.int32)}
        given = [x if cu or n in shared else x[None] for n, x in enumerate(tensors)]
        alone = _run(function, given, axis, T, **offsets)
        exact = _run(function, [x.double() for x in given], axis, T, **offsets)
        for way in ways:
            own = [x if n in shared else _own(x, rank, T, axis).contiguous() for n, x in enumerate(given)]
            split = _run(function, own, axis, T, rank, group=dist.group.WORLD, **offsets, **way)
            for n, (a, b, c) in enumerate(zip(split, alone, exact, strict=True)):
                if n - 2 in shared:
                    a = a.float()
                    dist.all_reduce(a)
                elif n != 1:
                    b, c = _own(b, rank, T, axis), _own(c, rank, T, axis)
                found.append((f"{kind} {'packed' if cu else 'dense'} {way} {n}", error(a, c), error(b, c)))
    return found


def _own(x: Tensor, rank: int, T: int, axis: int) -> Tensor:
    start, stop = contiguous(T, RANKS)[rank]
    return x.narrow(axis, start, stop - start)


def _run(
    function: Callable[..., Any], tensors: list[Tensor], axis: int, T: int, rank: int | None = None, **options: Any
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    y, last = function(*leaves, **options)
    last = last if isinstance(last, Tensor) else last[0]
    weights = torch.linspace(0.5, 1.5, T, device="cuda").view(*(1,) * axis, T, *(1,) * (y.ndim - axis - 1))
    if rank is not None:
        weights = _own(weights, rank, T, axis)
    # every rank has the last state, and the sum of the ranks' losses is the whole
    loss = (y.float() * weights).sum() + last.float().square().sum() / (1 if rank is None else RANKS)
    loss.backward()
    grads = [x.grad for x in leaves]
    return [y.detach(), last.detach(), *(x for x in grads if x is not None)]
