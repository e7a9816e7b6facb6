"""Target attention pair by pair in Python, and the problems that its ways are compared on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile import recommend

D64 = torch.float64
# users without events, with one, with few, and with more than a tile
LENGTHS = (5, 0, 1, 40, 150)
WEIGHTS: dict[str, dict[str, Any]] = {
    "softmax": {}, "silu": {"weights": "silu"}, "sigmoid": {"weights": "sigmoid", "mean": True},
}  # fmt: skip
SEARCHES = ("whole", "exact", "summed", "features", "lsh", "hashes", "category")


class Case(NamedTuple):
    """A call's tensors and keywords; candidates are (B, M, H, D)."""

    q: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None
    cu: Tensor
    words: dict[str, Any]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that have gradients."""
        return tuple(x for x in self[:4] if x is not None)

    def to(self, dtype: torch.dtype | None = None, device: str = "cpu") -> Case:
        """Returns a copy with leaves of its own."""
        leaves = (None if x is None else x.detach().to(device, dtype).requires_grad_() for x in self[:4])
        words = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.words.items()}
        return Case(*leaves, self.cu.to(device), words)

    def run(self, backend: str | None = None, **more: Any) -> Tensor:
        return recommend.target_attention(self.q, self.keys, self.cu, backend=backend, **self.given, **more)

    def events(self, backend: str | None = None, **more: Any) -> Tensor:
        return recommend.target_attention_with_events(self.q, self.keys, self.cu, backend=backend, **self.given, **more)[1]

    @property
    def given(self) -> dict[str, Any]:
        return {"values": self.values, "bias": self.bias, **self.words}


def case(
    weights: str = "softmax", search: str = "whole", bias: int = 0, *, lengths: tuple[int, ...] = LENGTHS, M: int = 7, H: int = 4,
    Hk: int = 2, D: int = 24, Dv: int = 16, k: int = 6,
) -> Case:  # fmt: skip
    """A problem of random numbers in fp64, `bias` of them per event. Numbers of a search are few, so that many are equal."""
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    B, total = len(lengths), int(cu[-1])
    shapes = ((B, M, H, D), (total, Hk, D), (total, Hk, Dv))
    q, keys, values = (torch.randn(shape, dtype=D64, requires_grad=True) for shape in shapes)
    numbers = torch.randn(total, bias, dtype=D64, requires_grad=True) if bias else None
    words: dict[str, Any] = dict(WEIGHTS[weights])
    if search != "whole":
        words |= {"top_k": k} if search == "category" else {"top_k": k, "short": "all"}
    if search == "summed":
        words["per_head"] = False
    elif search == "features":
        # small whole numbers, so that scores are exact and many are equal
        words |= {
            "search_q": torch.randint(-2, 3, (B, M, 1, 3)).float(),
            "search_keys": torch.randint(-2, 3, (total, 1, 3)).float(),
        }
    elif search == "lsh":
        words |= {"search": "lsh", "planes": recommend.simhash_planes(D, 7, seed=3)}
    elif search == "hashes":
        drawn = (torch.randint(-(2**31), 2**31, (n, 2, 2)).int() for n in (B * M, total))
        found, events = drawn
        words |= {"search": "lsh", "per_head": False, "search_keys": events[:, :1], "search_q": found[:, :1].unflatten(0, (B, M))}
    elif search == "category":
        words |= {
            "search": "category",
            "q_categories": torch.randint(0, 4, (B, M)),
            "key_categories": torch.randint(0, 5, (total,)),
        }
    return Case(q, keys, values, numbers, cu, words)


def by_pairs(given: Case, events: Tensor | None = None) -> Tensor:
    """Target attention as its docstring says it, a candidate and a head at a time, over the given events or all."""
    q, keys, values = (x.detach() for x in given[:3])
    B, M, H, D = q.shape
    o = torch.zeros(B, M, H, values.shape[2], dtype=q.dtype)
    for b, m, h in ((b, m, h) for b in range(B) for m in range(M) for h in range(H)):
        start, stop = int(given.cu[b]), int(given.cu[b + 1])
        read = range(start, stop)
        if events is not None:
            read = [start + j for j in events[b, m, h % events.shape[2]].tolist() if j >= 0]
        kv = h // (H // keys.shape[1])
        x = [float(q[b, m, h] @ keys[j, kv]) * D**-0.5 + bias_of(given, j, h) for j in read]
        kind = given.words.get("weights", "softmax")
        if kind == "softmax":
            top = max(x, default=0.0)
            w = [math.exp(y - top) for y in x]
            w = [y / sum(w) for y in w]
        else:
            gates = [1 / (1 + math.exp(-y)) for y in x]
            w = gates if kind == "sigmoid" else [y * gate for y, gate in zip(x, gates, strict=True)]
        if given.words.get("mean"):
            w = [y / len(w) for y in w]
        for y, j in zip(w, read, strict=True):
            o[b, m, h] += y * values[j, kv]
    return o


def bias_of(given: Case, j: int, h: int) -> float:
    return 0.0 if given.bias is None else float(given.bias.detach()[j, h % given.bias.shape[1]])


def by_sorting(given: Case) -> Tensor:
    """The events that a search chooses: pairs of a score and a place are sorted, the largest first."""
    words, (B, M, H) = given.words, given.q.shape[:3]
    kind, k = words.get("search", "exact"), words["top_k"]
    heads = 1 if kind == "category" or words.get("per_head") is False or "search_q" in words else H
    found = torch.full((B, M, heads, k), -1)
    for b, m, h in ((b, m, h) for b in range(B) for m in range(M) for h in range(heads)):
        start, stop = int(given.cu[b]), int(given.cu[b + 1])
        pairs = []
        for j in range(start, stop):
            score = score_of(given, kind, (b, m), j, [h] if heads > 1 or "search_q" in words else list(range(H)))
            if score is not None:
                pairs.append((score, j - start))
        best = [place for _, place in sorted(pairs, reverse=True)[:k]]
        found[b, m, h, : len(best)] = torch.tensor(best, dtype=torch.long)
    return found


def score_of(given: Case, kind: str, candidate: tuple[int, int], j: int, heads: list[int]) -> float | None:
    """The score of an event, summed over heads; None if the candidate may not read it."""
    words = given.words
    if kind == "category":
        return 0.0 if int(words["q_categories"][candidate]) == int(words["key_categories"][j]) else None
    q, keys = (words.get(name, x).detach() for name, x in (("search_q", given.q), ("search_keys", given.keys)))
    per_key = q.shape[2] // keys.shape[1]
    total = 0.0
    for h in heads:
        a, b = q[(*candidate, h)], keys[j, h // per_key]
        if kind == "lsh" and a.is_floating_point():
            total -= sum(int((a.double() @ plane > 0) != (b.double() @ plane > 0)) for plane in words["planes"].double().T)
        elif kind == "lsh":
            total -= sum(bin((x ^ y) & 0xFFFFFFFF).count("1") for x, y in zip(a.tolist(), b.tolist(), strict=True))
        else:
            total += float(a @ b) * given.q.shape[3] ** -0.5 + (0.0 if "search_q" in words else bias_of(given, j, h))
    return total


HOLES = torch.tensor([torch.nan, -torch.inf, torch.inf])
# the events' features, N of them: what a search that looks for bounds, columns and equal scores may go wrong on
ORDERS: dict[str, Any] = {
    "rising": lambda n: torch.arange(n).float(),
    "falling": lambda n: -torch.arange(n).float(),
    "equal": torch.ones,
    "few values": lambda n: torch.arange(n).mul(37).remainder(5).float() - 2,
    "random": torch.randn,
    "one column": lambda n: torch.where(torch.arange(n) % 128 == 3, 1000.0 + torch.arange(n), torch.randn(n)),
    "a burst": lambda n: torch.where((torch.arange(n) - n // 2).abs() < 60, 5.0, 0.0) + torch.randn(n),
    "holes": lambda n: torch.where(torch.arange(n) % 3 > 0, torch.randn(n), HOLES[torch.arange(n) // 3 % 3]),
    "no scores": lambda n: torch.full((n,), -torch.inf),
}  # fmt: skip


def check_order(order: str, lengths: tuple[int, ...], k: int, device: str = "cpu", nan: bool = True) -> None:
    """A search by one feature, of candidates that see an order, its reverse, zeros, and NaN, against a sort."""
    factors = torch.tensor([1.0, -1.0, 0.0, torch.nan][: 4 if nan else 3])
    keys = torch.cat([ORDERS[order](n) for n in lengths])
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    q, keys = factors.repeat(len(lengths), 1)[:, :, None, None], keys[:, None, None]
    words: dict[str, Any] = {"top_k": k, "short": "all", "scale": 1.0, "backend": "triton"}
    found = recommend.target_attention_with_events(q.to(device), keys.to(device), cu.to(device), **words)[1].cpu()
    for b, m in ((b, m) for b in range(len(lengths)) for m in range(len(factors))):
        x = (factors[m] * keys[cu[b] : cu[b + 1]]).flatten().tolist()
        pairs = [(math.inf if y != y else y, y != y, j) for j, y in enumerate(x) if y != -math.inf]
        due = [j for *_, j in sorted(pairs, reverse=True)[:k]]
        assert found[b, m, 0].tolist() == due + [-1] * (k - len(due)), (order, lengths, k, b, m)
