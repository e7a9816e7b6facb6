"""Functions that each rank runs in the tests of recurrences on split sequences; the tests read what comes back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import rooftile as rt
from rooftile import approximate as ap
from rooftile import parallel
from rooftile import recurrent as rec
from rooftile.models import TrainableDecoder
from rooftile.recurrent.split import carries
from rooftile.runtime.ranks import contiguous
from tests.parallel.context_model_cases import sentence
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
    for kind, cu in product(("delta", "channels"), (None, OFFSETS[0])):
        if ranks in (1, 2, 4):
            more = {"Hk": 4, "lengths": LENGTHS[ranks] if cu is None else None, "split": {"method": "heads"}}
            add(kind, 37, cu, **more)
            add(kind, 37, cu, **more, states=False)
    add("ssd", 11, dt_limit=(0.3, 0.9))
    add("conv", 5, K=1)
    return found


def difference(
    rank: int, ranks: int, group: Any, kind: str, T: int, cu: Any, lengths: Any = None, backend: str = "tiled",
    states: bool = True, split: Any = None, **options: Any,
) -> float:  # fmt: skip
    torch.manual_seed(0)
    case = CASES[kind](T, cu=None if cu is None else torch.tensor(cu, dtype=torch.int32), **options)
    start, stop = contiguous(T, ranks)[rank] if lengths is None else (sum(lengths[:rank]), sum(lengths[: rank + 1]))
    axis = 0 if cu is not None else 1
    leaves = {name: x.clone().requires_grad_() for name, x in (*case.tensors.items(), *case.given.items())}

    def here(name: str, x: Tensor) -> Tensor:
        return x if name in SHARED else x.narrow(axis, start, stop - start)

    own = {name: here(name, x).detach().clone().requires_grad_() for name, x in leaves.items()}
    got = called(case, own, states=states, backend=backend, group=group, **(split or {}))
    due = called(case, leaves, states=states, backend=backend)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, dtype=x.dtype) for x in due]
    # last states are everywhere, and each rank's loss asks for another share of them
    share = (rank + 1) / (ranks * (ranks + 1) / 2)
    parts = [here("", weights[0]), *(share * w for w in weights[1:])]
    # the largest exponent has no gradient
    unused = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(sum((y * w).sum() for y, w in zip(got, parts, strict=True)), list(own.values()), **unused)
    whole = torch.autograd.grad(sum((y * w).sum() for y, w in zip(due, weights, strict=True)), list(leaves.values()), **unused)
    pairs = [(got[0], here("", due[0])), *zip(got[1:], due[1:], strict=True)]
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


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mamba2": lambda: rt.nn.Mamba2(16, head_dim=8, state_size=6, groups=2, dtype=torch.float64),
    "mamba": lambda: rt.nn.Mamba(12, state_size=3, dtype=torch.float64),
    "delta": lambda: rt.nn.GatedDeltaNet(
        12, key_heads=2, value_heads=4, key_dim=6, value_dim=5, dtype=torch.float64
    ),
}  # fmt: skip


def layers(rank: int, ranks: int) -> list[tuple[str, float]]:
    """Returns the worst difference of outputs and gradients of layers inside a context from one process's."""
    found = []
    for name, checkpointed, cu in product(LAYERS, (False, True), (None, (0, 1, 8, 17))):
        torch.manual_seed(0)
        layer, T = LAYERS[name](), 17
        x, w = rand(1, T, layer.dim), rand(1, T, layer.dim)
        offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
        leaf = x.clone().requires_grad_()
        due = layer(leaf) if cu is None else layer(leaf[0], cu=offsets)[None]
        whole = torch.autograd.grad((due * w).sum(), [leaf, *layer.parameters()])
        own = parallel.shard(x, layout="contiguous").requires_grad_()
        with parallel.context(None, layout="contiguous", cu=offsets):
            if checkpointed:
                y = checkpoint(layer, own, use_reentrant=False, context_fn=parallel.checkpoint_contexts)
            else:
                y = layer(own)
            kept, state = layer.with_state(own)
        grads = torch.autograd.grad((y * parallel.shard(w, layout="contiguous")).sum(), [own, *layer.parameters()])
        due_state = (layer.with_state(x) if cu is None else layer.with_state(x[0], cu=offsets))[1]
        pairs = [(y, parallel.shard(due, layout="contiguous")), (kept, y), *zip(state, due_state, strict=True)]
        pairs.append((grads[0], parallel.shard(whole[0], layout="contiguous")))
        for a, b in zip(grads[1:], whole[1:], strict=True):
            a = a.contiguous()
            dist.all_reduce(a)
            pairs.append((a, b))
        found.append((f"{name} {checkpointed} {cu}", max(float((a - b).detach().abs().max()) for a, b in pairs)))
    return found


def hybrid(rank: int, ranks: int) -> list[float]:
    """Returns the worst difference of losses and weights from one process's in five steps of a hybrid with rotary positions."""
    found = []
    mamba = {"name": "mamba2", "head_dim": 8, "state_size": 6}
    for cu, T in ((None, 37), (None, 3), ((0, 1, 20, 37), 37)):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            model = TrainableDecoder(31, hidden=16, heads=2, layers=3, mixers=[mamba, "attention", mamba], max_len=40)
            models.append((model.double(), torch.optim.SGD(model.parameters(), lr=0.1)))
        (split, optimizer), (alone, other) = models
        offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
        ends, worst = (0, T) if cu is None else cu, 0.0
        for step in range(5):
            ids = torch.randint(31, (1 if cu else 2, T + 1), generator=torch.Generator().manual_seed(step))
            tokens, targets = (parallel.shard(x, layout="contiguous") for x in (ids[:, :-1], ids[:, 1:]))
            with parallel.context(None, layout="contiguous", cu=offsets, tokens=T):
                logits = split(tokens)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            logits = torch.cat([alone(ids[:, a:b]) for a, b in pairwise(ends)], 1)
            due = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            for x, steps in ((loss, optimizer), (due, other)):
                steps.zero_grad()
                (x / ids.numel()).backward()
            for weight in split.parameters():
                dist.all_reduce(weight.grad)
            optimizer.step()
            other.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            worst = max(worst, float((total - due.detach()).abs()))
        pairs = zip(split.parameters(), alone.parameters(), strict=True)
        found.append(max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs)))
    return found


def refused(rank: int, ranks: int) -> list[str]:
    """Returns the sentence of each refusal, which every rank gives by itself and without waiting."""
    x, layer = torch.randn(1, 6, 12), rt.nn.Mamba(12, state_size=3)
    q, W = torch.randn(1, 6, 2, 4), torch.randn(12, 4)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    world = dist.group.WORLD

    def inside(call: Any, **options: Any) -> str:
        with parallel.context(None, **{"layout": "contiguous", **options}):
            return sentence(call)

    def second_forward() -> None:
        leaf = x.clone().requires_grad_()
        with parallel.context(None, layout="contiguous"):
            y = checkpoint(layer, leaf, use_reentrant=False)
        y.sum().backward()

    return [
        inside(lambda: layer(x), layout="zigzag"),
        inside(lambda: layer(x), layout="balanced", cu=cu),
        inside(lambda: layer(x[0], cu=cu)),
        inside(lambda: layer(torch.cat((x, x)), cu=None), cu=cu),
        inside(lambda: rec.conv_step(torch.zeros(1, 12, 3), x[:, 0], W)),
        inside(lambda: ap.linear(q, q, q)),
        sentence(second_forward),
        sentence(lambda: rec.causal_conv(x[0], W, cu=torch.tensor([0, 30], dtype=torch.int32), group=world)),
        sentence(lambda: rec.causal_conv(x, W, group="cp")),
        sentence(lambda: ap.linear(q, q, q, rt.CAUSAL, backend="eager", group=world)),
        sentence(lambda: rec.causal_conv(x, W, backend="triton", group=world)),
        sentence(lambda: rec.gated_delta(q, q, q, -q[..., 0].abs(), q[..., 0], group=world, method="heads")),
        sentence(lambda: rec.gated_delta(q, q, q, -q[..., 0].abs(), q[..., 0], group=world, method="ring")),
        sentence(lambda: torch.func.grad(lambda x: rec.causal_conv(x, W, group=world)[0].sum())(x)),
    ]


def agreed(rank: int, ranks: int) -> list[str]:
    """Returns what each rank gets under validate where rank 1 has another problem, refuses its own, or has other tokens only."""
    world, odd = dist.group.WORLD, rank == 1
    x, W = torch.randn(1, 6, 12), torch.randn(12, 4)
    q, g = torch.randn(1, 6, 4, 8), -torch.rand(1, 6, 4)
    given = {"group": world, "validate": True}

    def inside() -> None:
        with parallel.context(None, layout="contiguous"):
            rec.causal_conv(x, W[:, : 3 if odd else 4], validate=True)

    return [
        sentence(lambda: rec.causal_conv(x.bfloat16() if odd else x, W.bfloat16() if odd else W, **given)),
        sentence(lambda: rec.causal_conv(x[..., : 5 if odd else 12], W, **given)),
        sentence(lambda: rec.gated_delta(q, q, q, g, -g, method="scan" if odd else "heads", **given)),
        sentence(lambda: rec.causal_conv(x.clone().requires_grad_(not odd), W, **given)),
        sentence(lambda: ap.linear(q, q, q, rt.FULL if odd else rt.CAUSAL, **given)),
        sentence(inside),
        sentence(lambda: rec.causal_conv(x[:, : 2 * rank], W, **given)),
        sentence(lambda: ap.performer(*[q[:, rank:]] * 3, rt.CAUSAL, features=ap.Features.draw(8, 8, seed=0), **given)),
        sentence(lambda: rec.causal_conv(x, W, group=world, validate="yes")),
    ]  # fmt: skip


def nan_stays(rank: int, ranks: int) -> list[tuple[str, list[bool], list[bool]]]:
    """Returns which tokens are finite beside a NaN in one packed sequence, split and on one process: outputs and gradients."""
    found = []
    for kind in CASES:
        torch.manual_seed(0)
        T, cu = 24, torch.tensor([0, 5, 14, 24], dtype=torch.int32)
        case = CASES[kind](T, cu=cu)
        tensors = dict(case.tensors)
        name = "x" if "x" in tensors else "v"
        tensors[name] = tensors[name].index_fill(0, torch.tensor(9), float("nan"))
        start, stop = contiguous(T, ranks)[rank]
        leaves = {n: x.clone().requires_grad_() for n, x in (*tensors.items(), *case.given.items())}
        own = {n: x if n in SHARED else x[start:stop].detach().requires_grad_() for n, x in leaves.items()}
        answers = []
        for given, options in ((own, {"group": dist.group.WORLD}), (leaves, {})):
            [y] = called(case, given, states=False, **options)
            [grad] = torch.autograd.grad(y.sum(), [given[name]])
            for x in (y, grad):
                finite = x.detach().isfinite().flatten(1).all(1)
                answers.append((finite if options else finite[start:stop]).tolist())
        found += [(f"{kind} y", answers[0], answers[2]), (f"{kind} gradient", answers[1], answers[3])]
    return found


def bytes_sent(rank: int, ranks: int) -> list[int]:
    """Returns the bytes that this rank sends in a forward: dense, with the last states, packed, and where nothing crosses."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(got: Tensor, given: Tensor, *arguments: Any, **options: Any) -> Any:
        sent[-1] += given.numel() * given.itemsize
        return exchange(got, given, *arguments, **options)

    dist.all_to_all_single = counted
    try:
        for kind, cu in product(("ssd", "conv", "delta"), (None, (0, 5, 24), (0, 6, 12, 18, 24))):
            sent.append(0)
            case = CASES[kind](24, cu=None if cu is None else torch.tensor(cu, dtype=torch.int32))
            start, stop = contiguous(24, ranks)[rank]
            every = {**case.tensors, **case.given}
            own = {n: x if n in SHARED else x.narrow(int(cu is None), start, stop - start) for n, x in every.items()}
            called(case, own, states=False, group=dist.group.WORLD)
    finally:
        dist.all_to_all_single = exchange
    return sent


def broken(rank: int, ranks: int) -> list[float]:
    """Returns the differences from one process without a decay, without a neighbour's tail, and without its gradient."""
    found = []
    for kind, carry, name, wrong in (
        ("ssd", carries.Decay, "back", lambda self, map, grad: grad),
        ("conv", carries.Shift, "join", lambda self, map, before, own: own),
        ("delta", carries.Matrix, "back", lambda self, map, grad: map @ grad),
    ):
        right = getattr(carry, name)
        setattr(carry, name, wrong)
        found.append(difference(rank, ranks, dist.group.WORLD, kind, 9, None))
        setattr(carry, name, right)
    return found


def every(rank: int, ranks: int) -> dict[str, Any]:
    """Returns the answers of all functions here: processes start once."""
    functions = (agreement, layers, hybrid, refused, agreed, nan_stays, bytes_sent, broken)
    return {function.__name__: function(rank, ranks) for function in functions}
