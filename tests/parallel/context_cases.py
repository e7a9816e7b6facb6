"""Functions that each rank runs in the tests of `context_attention`; the tests read what comes back."""

from __future__ import annotations

import itertools
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import rooftile as rt
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Prefix, Targets, Window
from rooftile.parallel import context, context_attention, positions, shard, unshard
from rooftile.recurrent import causal_conv

MASKS = (FULL, CAUSAL, CAUSAL & Window(7), Window(5, 3), Prefix(9), Chunk(6), CAUSAL & Chunk(8), Prefix(20) & Window(11))
# each form of a piece: ahead of the last query, between keys that are cut away, in two parts, in chunks
WITH_OPTIONS = (CAUSAL & Window(7), Window(5, 3), Prefix(9), Chunk(6))
# documents of one token, of none, and across every boundary
OFFSETS = (0, 1, 1, 20, 37)
# "far" has an lse far from 0, which a backward makes more exact where it has all of a row's keys
OPTIONS: tuple[tuple[str, ...], ...] = (
    (), ("sinks", "softcap", "scale"), ("alibi",), ("bias",), ("far",), ("dropout",), ("dropout", "alibi", "bias", "sinks"),
)  # fmt: skip


def agreement(rank: int, ranks: int) -> list[tuple[str, float]]:
    """Returns the worst difference from one process's fp64 results for each kind of call: o, lse and all gradients."""
    found = []
    for layout, method, mask, cu, Hk, names in product(
        ("zigzag", "contiguous", "balanced"), ("gather", "ulysses", "ring"), MASKS, (None, OFFSETS), (1, 4), OPTIONS
    ):
        T, H = 37, 4
        if method == "ulysses" and (H % ranks or (Hk % ranks and ranks % Hk) or "bias" in names):
            continue
        if names and (layout == "contiguous" or Hk == 1 or mask not in WITH_OPTIONS):
            continue
        # options meet other ranges in the same way: all of them at once
        if layout == "balanced" and (not cu or Hk == 1 or names not in (OPTIONS[0], OPTIONS[-1])):
            continue
        if "far" not in names and "sinks" not in names and names and method == "ulysses" and cu is None:
            continue
        name = f"{layout} {method} {mask} {'packed' if cu else 'dense'} Hk={Hk} {names}"
        found.append((name, _difference(T, H, Hk, mask, cu, layout, method, names)))
    return found


def on_grids(rank: int) -> list[tuple[str, float]]:
    """Returns the worst difference from one process on meshes of two dimensions: rows of two ranks, of one, and one row."""
    found = []
    for rows, method in product((2, 4, 1), ("usp", "usp-gather")):
        mesh = init_device_mesh("cpu", (rows, 4 // rows))
        for layout, mask, cu, names in (
            ("zigzag", CAUSAL, None, ("dropout", "alibi2", "sinks")), ("contiguous", Window(5, 3), OFFSETS, ("dropout", "alibi")),
            ("zigzag", Prefix(9), OFFSETS, ("sinks", "softcap", "scale")), ("zigzag", Chunk(6), None, ()),
            ("balanced", CAUSAL, OFFSETS, ("dropout", "alibi")),
        ):  # fmt: skip
            difference = _difference(37, 4, 1 if names else 2, mask, cu, layout, method, names, mesh)
            found.append((f"{rows} rows {method} {layout} {mask} {names}", difference))
    return found


def refused_grids(rank: int) -> list[str]:
    """Returns the sentences for meshes: of three dimensions, heads that a row cannot share, a bias, and methods of others."""
    q, five = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 5, 8)
    mesh = init_device_mesh("cpu", (1, 2))
    cubic = init_device_mesh("cpu", (1, 1, 2))

    def sentence(x: Tensor, group: Any, **arguments: Any) -> str:
        try:
            context_attention(x, x, x, CAUSAL, group=group, **arguments)
        except (InvalidInput, Unsupported) as error:
            return str(error)
        return ""

    def in_context(**arguments: Any) -> str:
        try:
            with context(mesh, layout="contiguous", **arguments):
                causal_conv(torch.randn(1, 6, 4), torch.randn(4, 3))
        except (InvalidInput, Unsupported) as error:
            return str(error)
        return ""

    return [
        sentence(q, cubic),
        sentence(five, mesh),
        sentence(q, mesh, bias=torch.ones(4, 6, 12)),
        sentence(q, mesh, method="ring"),
        sentence(q, None, method="usp"),
        sentence(q, mesh, scale=1.0 + rank, validate=True),
        in_context(method="ulysses"),
        in_context(),
    ]


def _difference(T, H, Hk, mask, cu, layout, method, names, group=None) -> float:
    torch.manual_seed(0)
    shape = (T,) if cu else (2, T)
    axis = len(shape) - 1
    q, k, v = (torch.randn(*shape, heads, dim, dtype=torch.float64) for heads, dim in ((H, 16), (Hk, 16), (Hk, 24)))
    do, dlse = torch.randn(*shape, H, 24, dtype=torch.float64), torch.randn(*shape[:-1], H, T, dtype=torch.float64)
    options: dict[str, Any] = {}
    if "sinks" in names:
        options |= {"sinks": torch.randn(H, dtype=torch.float64), "softcap": 2.0, "scale": 0.4}
    if "far" in names:
        options["scale"] = 30.0
    if "alibi2" in names:
        options["alibi"] = torch.rand(2, H, dtype=torch.float64)
    if "alibi" in names:
        options["alibi"] = torch.rand((len(cu) - 1 if cu else 2, H) if "dropout" in names else H, dtype=torch.float64)
    if "bias" in names:
        # one row for all, and a head for all where other options are beside it
        few = "dropout" in names
        longest = max(b - a for a, b in itertools.pairwise(cu)) if cu else T
        outer = () if cu else (1,)
        options["bias"] = torch.randn(*outer, 1 if few else H, 1 if few else T, longest, dtype=torch.float64)
    if "dropout" in names:
        options |= {"dropout": 0.3, "seed": 2**40 + 17}
    leaves = {"q": q, "k": k, "v": v} | {n: x for n, x in options.items() if n in ("sinks", "bias")}
    leaves = {n: x.clone().requires_grad_() for n, x in leaves.items()}
    tensors, rest = [leaves[n] for n in "qkv"], options | {n: x for n, x in leaves.items() if n not in "qkv"}
    if cu:
        offsets = torch.tensor(cu)
        o, lse = rt.attention_packed_with_lse(*tensors, offsets, offsets, mask, backend="eager", **rest)
    else:
        o, lse = rt.attention_with_lse(*tensors, mask, backend="eager", **rest)
    due = _gradients(o, lse, do, dlse, leaves)
    pack = torch.tensor(cu) if cu else None
    own = {n: shard(x.detach(), group, axis, layout, pack) for n, x in leaves.items() if n in "qkv"}
    if "bias" in leaves:
        whole = leaves["bias"].detach()
        own["bias"] = whole.clone() if whole.shape[-2] == 1 else shard(whole, dim=-2, layout=layout, cu=pack)
    if "sinks" in leaves:
        own["sinks"] = leaves["sinks"].detach().clone()
    own = {n: x.clone().requires_grad_() for n, x in own.items()}
    rest = options | {n: x for n, x in own.items() if n not in "qkv"}
    got = context_attention(
        own["q"], own["k"], own["v"], mask, group=group, layout=layout, method=method, tokens=T, return_lse=True,
        cu=pack, **rest,
    )  # fmt: skip
    found = _gradients(*got, shard(do, group, axis, layout, pack), shard(dlse, group, -1, layout, pack), own)
    shared = [n for n in found if n == "sinks" or (n == "bias" and found[n].shape[-2] == 1)]
    for n in shared:
        dist.all_reduce(found[n])
    joined = {"layout": layout, "tokens": T, "cu": pack}
    pairs = [(unshard(got[0].detach(), group, axis, **joined), o), (unshard(got[1].detach(), group, -1, **joined), lse)]
    for n, x in found.items():
        whole = x if n in shared else unshard(x, group, -2 if n == "bias" else axis, **joined)
        pairs.append((whole, due[n]))
    return max(float((a - b).nan_to_num(neginf=-1.0).abs().max()) for a, b in pairs)


def _gradients(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = (o * do).sum() + (lse * dlse).where(lse.isfinite(), 0).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def errors(rank: int, dtype: torch.dtype, method: str) -> list[tuple[float, float]]:
    """Returns the mean error against fp64 of the split call and of one process's, for o, dq, dk and dv."""
    torch.manual_seed(1)
    T = 203
    tensors = [torch.randn(2, T, heads, 32).to(dtype) for heads in (8, 4, 4, 8)]

    def run(q, k, v, do, call) -> list[Tensor]:
        q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
        o = call(q, k, v)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    exact = run(*(x.double() for x in tensors), lambda *x: rt.attention(*x, CAUSAL, backend="eager"))
    alone = run(*tensors, lambda *x: rt.attention(*x, CAUSAL, backend="tiled"))
    own = [shard(x) for x in tensors]
    split = run(*own, lambda *x: context_attention(*x, CAUSAL, group=None, tokens=T, method=method, backend="tiled"))
    split = [unshard(x, tokens=T) for x in split]
    return [
        (float((a.double() - c).abs().mean()), float((b.double() - c).abs().mean()))
        for a, b, c in zip(split, alone, exact, strict=True)
    ]


def few_tokens(rank: int) -> list[float]:
    """Returns differences from one process where ranks have one token or none."""
    found = []
    for T, method in product((0, 1, 2, 3, 5), ("gather", "ulysses", "ring")):
        torch.manual_seed(2)
        q, k, v = (torch.randn(1, T, 4, 8, requires_grad=True) for _ in range(3))
        o = rt.attention(q, k, v, CAUSAL)
        due = [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]
        own = [shard(x.detach()).requires_grad_() for x in (q, k, v)]
        o = context_attention(*own, CAUSAL, group=None, tokens=T, method=method)
        got = [o.detach(), *torch.autograd.grad(o.square().sum(), own)]
        found += [float((unshard(a, tokens=T) - b).abs().sum()) for a, b in zip(got, due, strict=True)]
    return found


def hidden_nan(rank: int) -> list[list[bool]]:
    """Returns which elements are finite behind a NaN in the last token's keys and values: split, and on one process."""
    T = 24
    q, k, v = (torch.randn(1, T, 2, 8) for _ in range(3))
    k[:, -1] = v[:, -1] = float("nan")
    found = []
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = rt.attention(*leaves, CAUSAL, backend="tiled")
    alone = [o.detach(), *torch.autograd.grad(o[:, :-1].sum(), leaves)]
    own = [shard(x).requires_grad_() for x in (q, k, v)]
    o = context_attention(*own, CAUSAL, group=None, backend="tiled")
    before = shard(torch.arange(T) < T - 1, dim=0)
    split = [o.detach(), *torch.autograd.grad(o[:, before].sum(), own)]
    for a, b in zip(alone, split, strict=True):
        found.append([bool(x.isfinite().all(-1).all(-1)[0, t]) for x in (a, unshard(b)) for t in range(T)])
    return found


def same_bits(rank: int) -> list[bool]:
    """Returns whether ulysses gives one process's bits, and whether gather and ring give the same gradients in two runs."""
    torch.manual_seed(3)
    q, k, v, do = (torch.randn(1, 50, 4, 16) for _ in range(4))

    def run(*x: Tensor, call) -> list[Tensor]:
        x = tuple(a.detach().clone().requires_grad_() for a in x)
        o = call(*x)
        return [o.detach(), *torch.autograd.grad(o, x, do if o.shape[1] == 50 else shard(do))]

    alone = run(q, k, v, call=lambda *x: rt.attention(*x, CAUSAL, deterministic=True, backend="tiled"))
    own = [shard(x) for x in (q, k, v)]
    found = []
    for method in ("ulysses", "gather", "gather", "ring", "ring"):
        got = run(
            *own,
            call=lambda *x, m=method: context_attention(*x, CAUSAL, group=None, method=m, deterministic=True, backend="tiled"),
        )
        found.append([unshard(x) for x in got])
    equal = [torch.equal(a, b) for a, b in zip(found[0], alone, strict=True)]
    again = [torch.equal(a, b) for n in (1, 3) for a, b in zip(found[n], found[n + 1], strict=True)]
    return equal + again


def under_autocast(rank: int) -> list[tuple[str, str, float]]:
    """Returns the dtypes of o and of a gradient under autocast to bf16, and the difference from one process, for each method."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 12, heads, 16) for heads in (4, 2, 2))
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        due = shard(rt.attention(q, k, v, CAUSAL))
        for method in ("gather", "ulysses", "ring"):
            own = [shard(x).requires_grad_() for x in (q, k, v)]
            o = context_attention(*own, CAUSAL, group=None, method=method)
            [grad] = torch.autograd.grad(o.float().sum(), own[1:2])
            found.append((str(o.dtype), str(grad.dtype), float((o.detach().float() - due.float()).abs().max())))
    return found


def drawn(rank: int) -> list[tuple[str, bool]]:
    """Returns whether a draw without a seed is rank 0's, and one device's, and advances generators that differ by one draw."""
    q, k, v = (torch.randn(2, 21, 4, 8, generator=torch.Generator().manual_seed(5)) for _ in range(3))
    torch.manual_seed(0)
    due = rt.attention(q, k, v, CAUSAL, dropout=0.4)
    own = [shard(x) for x in (q, k, v)]
    found = []
    for method in ("gather", "ulysses", "ring"):
        torch.manual_seed(rank)
        torch.randint(2**62, (1,))
        after = torch.get_rng_state()
        torch.manual_seed(rank)
        o = context_attention(*own, CAUSAL, group=None, method=method, dropout=0.4, tokens=21)
        found.append((method, torch.allclose(unshard(o, tokens=21), due, atol=1e-6)))
        found.append((f"{method}'s generator", torch.equal(torch.get_rng_state(), after)))
    return found


def refused(rank: int) -> list[str]:
    """Returns the sentence of each refusal, which every rank gives by itself and without waiting."""
    q = torch.randn(1, 6, 4, 8)

    def sentence(x: Tensor = q, **arguments: Any) -> str:
        try:
            context_attention(x, x, x, arguments.pop("mask", CAUSAL), group=arguments.pop("group", None), **arguments)
        except (InvalidInput, Unsupported) as error:
            return str(error)
        return ""

    def under_func() -> str:
        try:
            torch.func.grad(lambda x: context_attention(x, q, q, CAUSAL, group=None).sum())(q)
        except Unsupported as error:
            return str(error)
        return ""

    five = torch.randn(1, 6, 5, 8)
    return [
        sentence(method="fast"),
        sentence(layout="spiral"),
        sentence(layout="balanced"),
        sentence(five, method="ulysses"),
        sentence(group="cp"),
        sentence(tokens=30),
        sentence(tokens=1.5),
        sentence(q[0], cu=torch.tensor([0, 5])),
        sentence(dropout=1.5),
        sentence(dropout=0.1, seed=0.5),
        under_func(),
        sentence(alibi=torch.ones(3)),
        sentence(mask=CAUSAL & Targets(2)),
        sentence(method="ring", bias=torch.ones(4, 12, 12)),
        sentence(method="ulysses", bias=torch.ones(4, 6, 12)),
        sentence(dropout=0.1, seed=rank, validate=True),
        sentence(mask=CAUSAL if rank else FULL, validate=True),
        sentence(q if rank else q[:, :5], validate=True),
        # the other rank must not wait for it
        sentence(method="fast" if rank else "gather", validate=True),
    ]


def dealt(rank: int, ranks: int) -> list[list[Any]]:
    """Returns what `shard`, `unshard` and `positions` give over tokens that are their own positions, for each layout."""
    cu, found = torch.tensor([0, 4, 4, 11]), []
    for layout, given in (("zigzag", {"tokens": 11}), ("balanced", {"cu": cu})):
        own = shard(torch.arange(11.0)[None], layout=layout, cu=given.get("cu"))
        leaf = own.clone().requires_grad_()
        whole = unshard(leaf, layout=layout, **given)
        [grad] = torch.autograd.grad((whole * torch.arange(11.0) * (rank + 1)).sum(), [leaf])
        found.append([own.tolist(), whole.tolist(), grad.tolist(), positions(11, layout=layout, cu=cu).tolist()])
    return found


def refused_documents(rank: int) -> list[str]:
    """Returns the sentences for a layout that lacks its documents, and for documents of another length."""

    def sentence(call: Any) -> str:
        try:
            call()
        except InvalidInput as error:
            return str(error)
        return ""

    def inside() -> None:
        with context(None, "balanced"):
            pass

    x, cu = torch.zeros(1, 12), torch.tensor([0, 5, 11])
    return [
        sentence(lambda: shard(x, layout="balanced")),
        sentence(lambda: unshard(x, layout="balanced")),
        sentence(lambda: positions(12, layout="balanced")),
        sentence(inside),
        sentence(lambda: shard(x, cu=cu)),
        sentence(lambda: unshard(x[:, :6], tokens=12, cu=cu)),
        sentence(lambda: positions(12, layout="balanced", cu=cu)),
        sentence(lambda: shard(x, layout="balanced", cu=[0, 12])),
    ]
