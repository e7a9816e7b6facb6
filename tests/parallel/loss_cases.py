"""Functions that each rank runs in the tests of a loss over ranks; the tests read what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rooftile import fused
from rooftile.errors import InvalidInput, Unsupported

V, D, T = 37, 5, 13
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.3, "z_loss": 0.1},
    {"softcap": 2.0, "ignore_index": 3, "label_smoothing": 0.2},
)
# tokens of each rank, and rows of each rank, by the number of ranks: some have none
TOKENS = {1: (13,), 2: (13, 0), 3: (4, 0, 9), 4: (1, 6, 2, 4)}
ROWS = {1: (37,), 2: (20, 17), 3: (0, 36, 1), 4: (10, 10, 10, 7)}


def formula(x: Tensor, w: Tensor, b: Tensor, target: Tensor, reduction: str, **options: Any) -> Tensor:
    """The loss from all logits, in plain operations."""
    z = x @ w.T + b
    if cap := options.get("softcap"):
        z = cap * torch.tanh(z / cap)
    e, ignored = options.get("label_smoothing", 0.0), target == options.get("ignore_index", -100)
    lse = z.logsumexp(-1)
    picked = z.gather(-1, target.masked_fill(ignored, 0)[..., None])[..., 0]
    losses = lse - (1 - e) * picked - e * z.mean(-1) + options.get("z_loss", 0.0) * lse**2
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()


def problem(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns x, w and b, the targets, and an upstream gradient for each token."""
    torch.manual_seed(0)
    # large logits, so that a largest one of another rank matters; x has strides of its own
    tensors = [torch.randn(D, T).T * 3, torch.randn(V, D) * 3, torch.randn(V)]
    target = torch.randint(V, (T,))
    target[[2, 5]] = -100
    return [x.to(dtype) for x in tensors], target, torch.randn(T, dtype=torch.float64)


def part(x: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    return x.split(sizes)[rank]


def groups(rank: int, ranks: int) -> Iterator[tuple[Any, int, int]]:
    """Yields groups of one, two, three and four ranks with this rank's number in each and their size."""
    for size in range(1, ranks + 1):
        for start in range(0, ranks - size + 1, size):
            group = dist.new_group(list(range(start, start + size)))
            if start <= rank < start + size:
                yield group, rank - start, size


def agreement(rank: int, ranks: int) -> list[tuple[str, float]]:
    """Returns the worst difference from one process's fp64 loss and gradients, for each kind of call."""
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    whole, target, upstream = problem()
    kinds = [(group, own, size, split) for group, own, size in groups(rank, ranks) for split in ("tokens", "vocabulary")]
    kinds.append((mesh, 0, 2, ("tokens", "vocabulary")))
    for (group, own, size, split), reduction, options in product(kinds, ("mean", "sum", "none"), OPTIONS):
        options = {"ignore_index": -100} | options
        y = target.masked_fill(target == -100, options["ignore_index"])
        due_leaves = [x.clone().requires_grad_() for x in whole]
        due = formula(*due_leaves, y, reduction, **options)
        factor = upstream if reduction == "none" else torch.tensor(-1.7, dtype=torch.float64)
        expected = list(torch.autograd.grad(due, due_leaves, factor))
        place = {"tokens": own, "vocabulary": own} if isinstance(split, str) else {"tokens": rank // 2, "vocabulary": rank % 2}
        sizes = TOKENS[size] if "tokens" in split else (T,)
        rows = ROWS[size] if "vocabulary" in split else (V,)
        t, v = (place["tokens"] if "tokens" in split else 0), (place["vocabulary"] if "vocabulary" in split else 0)
        leaves = [part(whole[0], sizes, t), part(whole[1], rows, v), part(whole[2], rows, v)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        words = {"vocabulary": V} if "vocabulary" in split else {}
        loss = fused.linear_cross_entropy(
            leaves[0], leaves[1], part(y, sizes, t), linear_bias=leaves[2], reduction=reduction, group=group, split=split,
            **words, **options,
        )  # fmt: skip
        mine = part(factor, sizes, t) if reduction == "none" else factor
        grads = list(torch.autograd.grad(loss, leaves, mine))
        if "tokens" in split:
            for x in grads[1:]:
                dist.all_reduce(x, group=group if isinstance(split, str) else mesh.get_group("cp"))
        expected = [part(expected[0], sizes, t), *(part(x, rows, v) for x in expected[1:])]
        pairs = [(loss.detach(), part(due.detach(), sizes, t) if reduction == "none" else due.detach())]
        pairs += list(zip(grads, expected, strict=True))
        worst = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
        assert all(a.shape == b.shape for a, b in pairs)
        found.append((f"{size} ranks, {split}, {reduction}, {options}", worst))
    return found


def errors(rank: int, ranks: int) -> list[tuple[str, list[tuple[float, float]]]]:
    """Returns the mean errors against fp64 of the split loss and of one process's, in fp32, bf16, fp16 and under autocast."""
    found = []
    for name, split in product(("float32", "bfloat16", "float16", "autocast"), ("tokens", "vocabulary")):
        dtype = torch.float32 if name == "autocast" else getattr(torch, name)
        torch.manual_seed(1)
        x, w = torch.randn(64, 32).to(dtype), torch.randn(4 * 50, 32).to(dtype)
        target = torch.randint(200, (64,))

        def run(x, w, target, cast, **words) -> list[Tensor]:
            leaves = [y.clone().requires_grad_() for y in (x, w)]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = fused.linear_cross_entropy(*leaves, target, **words)
            return [loss.detach(), *torch.autograd.grad(loss, leaves)]

        exact = run(x.double(), w.double(), target, False)
        alone = run(x, w, target, name == "autocast")
        own = [x, w, target]
        for n in (0, 2) if split == "tokens" else (1,):
            own[n] = own[n].chunk(ranks)[rank]
        got = run(*own, name == "autocast", group=dist.group.WORLD, split=split)
        if split == "tokens":
            got[2] = got[2].float()
            dist.all_reduce(got[2])
        # the loss is whole; so is the gradient of what is not cut
        cut = [split == "vocabulary", split == "tokens"]
        for whole in (alone, exact):
            whole[1:] = [x.chunk(ranks)[rank] if not one else x for x, one in zip(whole[1:], cut, strict=True)]
        pairs = [
            (float((a.double() - c).abs().mean()), float((b.double() - c).abs().mean()))
            for a, b, c in zip(got, alone, exact, strict=True)
        ]
        found.append((f"{name} {split}", pairs))
    return found


def seams(rank: int) -> dict[str, bool]:
    """Returns whether a loss over ranks is right in small chunks, compiled, under no_grad, and for targets without one."""
    from rooftile.fused import chunks

    found: dict[str, bool] = {}
    (x, w, b), target, _ = problem(torch.float32)
    rows = ROWS[2]
    own = [part(w, rows, rank), part(b, rows, rank)]
    words: dict[str, Any] = {"group": dist.group.WORLD, "split": "vocabulary", "vocabulary": V}
    due = fused.linear_cross_entropy(x, w, target, linear_bias=b, label_smoothing=0.1)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fused.linear_cross_entropy(x, w, target, linear_bias=b, label_smoothing=0.1, **words)

    def close(y: Tensor, due: Tensor) -> bool:
        return bool(torch.allclose(y, due, rtol=1e-5, atol=1e-5, equal_nan=True))

    leaf = x.clone().requires_grad_()
    dx = torch.autograd.grad(loss(leaf, *own), leaf)[0]
    before, chunks.ON_CPU = chunks.ON_CPU, 3 * 4 * 19
    # an uneven vocabulary, in chunks of few rows: every rank computes the same ones
    found["chunks"] = close(loss(x, *own), due) and close(torch.autograd.grad(loss(leaf, *own), leaf)[0], dx)
    chunks.ON_CPU = before
    with torch.no_grad():
        found["no_grad"] = close(loss(x, *own), due)
    with torch.inference_mode():
        found["inference"] = close(loss(x, *own), due)
    compiled = torch.compile(lambda *t: 2 * loss(*t), backend="aot_eager")
    found["compiled"] = close(compiled(x, *own), 2 * due)
    # only the hidden states, only the weight
    weight = own[0].clone().requires_grad_()
    frozen = torch.autograd.grad(loss(x, weight, own[1]), weight)[0]
    leaves = [leaf, weight]
    found["frozen"] = close(frozen, torch.autograd.grad(loss(*leaves, own[1]), leaves)[1])
    # a shift of whole sequences, and any leading shape
    args = (x[:12].view(2, 6, D), target[:12].view(2, 6))
    whole = fused.linear_cross_entropy(args[0], w, args[1], shift=True, reduction="none")
    split = fused.linear_cross_entropy(args[0], own[0], args[1], shift=True, reduction="none", **words)
    found["shift"] = split.shape == (2, 5) and close(split, whole)
    ignored = torch.full_like(target, -100)
    found["ignored"] = bool(fused.linear_cross_entropy(x, own[0], ignored, **words).isnan())
    nothing = fused.linear_cross_entropy(x[:0], own[0], target[:0], reduction="sum", **words)
    found["no tokens"] = float(nothing) == 0.0
    # a logit that is far above all others, on one rank: the others' would overflow without it
    far = torch.zeros(V)
    far[V - 1] = 1e4
    found["far"] = close(
        loss(x, own[0], part(far, rows, rank)), fused.linear_cross_entropy(x, w, target, linear_bias=far, label_smoothing=0.1)
    )
    nan = x.clone()
    nan[0] = torch.nan
    losses = fused.linear_cross_entropy(nan, own[0], target, reduction="none", **words)
    found["nan"] = bool(losses[0].isnan()) and bool(losses[1:].isfinite().all())
    return found


def refused(rank: int) -> list[str]:
    """Returns the sentence of each refusal, which every rank gives and none waits for."""
    from torch.distributed.tensor import DTensor, Replicate

    (x, w, _), target, _ = problem()
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (2,))

    def sentence(*tensors: Tensor, **words: Any) -> str:
        try:
            fused.linear_cross_entropy(*(tensors or (x, w, target)), **words)
        except (InvalidInput, Unsupported) as error:
            return str(error)
        return ""

    def under_func() -> str:
        try:
            torch.func.grad(lambda x: fused.linear_cross_entropy(x, w, target, group=world, split="tokens"))(x)
        except Unsupported as error:
            return str(error)
        return ""

    def twice() -> str:
        leaf = x.clone().requires_grad_()
        loss = fused.linear_cross_entropy(leaf, w, target.clamp(max=V - 1), group=world, split="vocabulary")
        try:
            torch.autograd.grad(loss, leaf, create_graph=True)
        except Unsupported as error:
            return str(error)
        return ""

    return [
        sentence(group=world),
        sentence(split="tokens"),
        sentence(group=world, split="rows"),
        sentence(group=world, split=("tokens", "vocabulary")),
        sentence(group="tp", split="tokens"),
        sentence(group=world, split="tokens", vocabulary=V),
        sentence(group=world, split="vocabulary", vocabulary=V - 1),
        sentence(group=world, split="vocabulary", vocabulary=V + 5),
        sentence(group=world, split="tokens", shift=True),
        sentence(x, DTensor.from_local(w, mesh, [Replicate()]), target, group=world, split="vocabulary"),
        sentence(x.to("meta"), w.to("meta"), target.to("meta"), group=world, split="vocabulary"),
        sentence(x, w, target + 2 * V, group=world, split="vocabulary"),
        under_func(),
        twice(),
        sentence(x if rank else x[1:], w, target if rank else target[1:], group=world, split="vocabulary", validate=True),
        sentence(x, w, target, group=world, split="tokens", softcap=1.0 + rank, validate=True),
    ]


def on_four(rank: int) -> tuple[list[Any], list[Any]]:
    return agreement(rank, 4), errors(rank, 4)


def on_two(rank: int) -> tuple[dict[str, bool], list[str]]:
    return seams(rank), refused(rank)
