"""Each method once more, in loops over Python's numbers, as its paper writes it: no line is shared with the tested code.

Definitions and fast paths share some functions, so both could be wrong alike. Here neither takes part in the answer, but for
what a method draws or fits: a projection, hashes, a rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap

T, H, HK, D, DV = 13, 4, 2, 4, 3
Row = list[float]


def dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def mean_of(values: list[Row], weights: list[float]) -> Row:
    total = sum(weights)
    return [sum(w * v[c] for w, v in zip(weights, values, strict=True)) / total if total else 0.0 for c in range(DV)]


def attend(q: Row, keys: list[Row], values: list[Row], seen: Iterable[int], scale: float) -> Row:
    """softmax(scale q K^T) V over the keys that are seen."""
    seen = sorted(seen)
    return mean_of([values[j] for j in seen], [math.exp(scale * dot(q, keys[j])) for j in seen])


def best(scores: list[float], count: int) -> set[int]:
    """The largest scores, ties to the lower index."""
    return set(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count])


def columns(x: Tensor) -> list[list[Row]]:
    """The rows of each head of x (1, T, heads, D)."""
    return x[0].transpose(0, 1).double().tolist()


def inputs(T: int = T) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, T, H, D), torch.randn(1, T, HK, D), torch.randn(1, T, HK, DV)


def compare(run: Callable[..., Tensor], tensors: tuple[Tensor, ...], due: list[list[Row]]) -> None:
    """The fast path in fp32, and the definition in fp64."""
    answer = torch.tensor(due, dtype=torch.float64).transpose(0, 1)[None]
    torch.testing.assert_close(run(*tensors, backend=None), answer.float(), atol=3e-5, rtol=3e-5)
    exact = run(*(x.double() for x in tensors), backend="eager")
    torch.testing.assert_close(exact, answer, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_linear(causal: bool) -> None:
    """2006.16236, equations 9 and 12."""

    def phi(x: Row) -> Row:
        return [(a if a > 0 else math.exp(a) - 1) + 1 for a in x]

    q, k, v = tensors = inputs()
    due = []
    for h, rows in enumerate(columns(q)):
        keys, values = columns(k)[h // 2], columns(v)[h // 2]
        last = [range(i + 1 if causal else T) for i in range(T)]
        due.append([mean_of([values[j] for j in last[i]], [dot(phi(rows[i]), phi(keys[j])) for j in last[i]]) for i in range(T)])
    mask = rt.CAUSAL if causal else rt.FULL
    compare(lambda q, k, v, backend: ap.linear(q, k, v, mask, backend=backend), tensors, due)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric", "relu"])
def test_performer(kind: str) -> None:
    """2009.14794, section 2.3 and lemma 1."""
    features = ap.Features.draw(D, 32, kind=kind, seed=5)
    w = features.projection.double().tolist()

    def phi(x: Row) -> Row:
        x = [a * D**-0.25 for a in x]
        p, half = [dot(row, x) for row in w], dot(x, x) / 2
        if kind == "positive":
            return [math.exp(a - half) for a in p]
        if kind == "hyperbolic":
            return [math.exp(a - half) for a in p] + [math.exp(-a - half) for a in p]
        if kind == "trigonometric":
            return [math.exp(half) * math.cos(a) for a in p] + [math.exp(half) * math.sin(a) for a in p]
        return [max(a, 0.0) for a in p]

    # short vectors, whose sums of cosines are far from zero
    q, k, v = tensors = tuple(x * s for x, s in zip(inputs(), (0.5, 0.5, 1.0), strict=True))
    due = []
    for h, rows in enumerate(columns(q)):
        keys, values = columns(k)[h // 2], columns(v)[h // 2]
        due.append([mean_of(values[: i + 1], [dot(phi(rows[i]), phi(keys[j])) for j in range(i + 1)]) for i in range(T)])
    compare(lambda q, k, v, backend: ap.performer(q, k, v, rt.CAUSAL, features=features, backend=backend), tensors, due)


def test_linformer() -> None:
    """2006.04768, equation 7, with a projection that is wider than the text."""
    q, k, v = tensors = inputs()
    e, f = torch.randn(1, 5, T + 4), torch.randn(HK, 5, T + 4)
    due = []
    for h, rows in enumerate(columns(q)):
        keys, values = columns(k)[h // 2], columns(v)[h // 2]
        of_k, of_v = e[0].double().tolist(), f[h // 2].double().tolist()
        projected = [[sum(of_k[r][j] * keys[j][c] for j in range(T)) for c in range(D)] for r in range(5)]
        valued = [[sum(of_v[r][j] * values[j][c] for j in range(T)) for c in range(DV)] for r in range(5)]
        due.append([attend(row, projected, valued, range(5), D**-0.5) for row in rows])
    compare(lambda q, k, v, backend: ap.linformer(q, k, v, e.to(q.dtype), f.to(q.dtype), backend=backend), tensors, due)


@pytest.mark.parametrize("heads", ["union", "split", "first", "second"])
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_sparse_transformer(pattern: str, heads: str) -> None:
    """1904.10509, section 4.3, with l = 4 and c = 2; the near keys of the strided set are l, itself among them."""
    q, k, v = tensors = inputs()
    due = []
    for h, rows in enumerate(columns(q)):
        part = heads if heads != "split" else "first" if h < H // 2 else "second"
        outs = []
        for i in range(T):
            if pattern == "strided":
                near, far = {j for j in range(i + 1) if i - j < 4}, {j for j in range(i + 1) if (i - j) % 4 == 0}
            else:
                near, far = {j for j in range(i + 1) if j // 4 == i // 4}, {j for j in range(i + 1) if j % 4 >= 2}
            seen = {"union": near | far, "first": near, "second": far}[part]
            outs.append(attend(rows[i], columns(k)[h // 2], columns(v)[h // 2], seen, D**-0.5))
        due.append(outs)
    run = lambda q, k, v, backend: ap.sparse_transformer(  # noqa: E731
        q, k, v, pattern=pattern, sets=heads, stride=4, summary=2, backend=backend
    )
    compare(run, tensors, due)


@pytest.mark.parametrize("mode", ["causal", "full", "strict", "counted"])
def test_reformer(mode: str) -> None:
    """2001.04451, section 2 and appendix A: rounds of chunks of 4, each seeing itself and the chunk before.

    The small term in the length of keys is that of the code that trained the paper's models.
    """
    qk, _, v = inputs()
    hashes = ap.lsh(qk, rounds=3, buckets=4, seed=2)
    due = []
    for h, rows in enumerate(columns(qk)):
        values, keys = columns(v)[h // 2], [[a / math.sqrt(dot(row, row) + D * 1e-6) for a in row] for row in rows]
        found = [[_seen_in_round(hashes[0, :, h, r].tolist(), i, mode) for r in range(3)] for i in range(T)]
        outs = []
        for i in range(T):
            pairs = [(j, sum(j in one for one in found[i])) for seen in found[i] for j in seen]
            # a pair that n rounds see has the weight of one: ln n is taken off its score
            weights = [math.exp(dot(rows[i], keys[j])) / (1 if mode == "counted" else n) for j, n in pairs]
            outs.append(mean_of([values[j] for j, _ in pairs], weights) if pairs else values[i])
        due.append(outs)
    options = {"strict": mode == "strict", "duplicates": "counted" if mode == "counted" else "once"}
    mask = rt.FULL if mode == "full" else rt.CAUSAL
    run = lambda qk, v, backend: ap.reformer(  # noqa: E731
        qk, v, mask, chunk=4, hashes=hashes, backend=backend, **options
    )
    compare(run, (qk, v), due)


def _seen_in_round(hashes: list[int], i: int, mode: str) -> set[int]:
    order = sorted(range(T), key=lambda t: (hashes[t], t))
    if mode == "strict":
        return set([j for j in order if hashes[j] == hashes[i] and j < i][-4:])
    chunks = [order[n : n + 4] for n in range(0, T, 4)]
    own = next(n for n, chunk in enumerate(chunks) if i in chunk)
    # the first chunk's predecessor is the last one
    return {j for j in chunks[own] + chunks[own - 1] if (j != i if mode == "full" else j < i)}


@pytest.mark.parametrize("strict", [False, True])
def test_routing(strict: bool) -> None:
    """2003.05997, algorithm 1, with three centroids."""
    q, k, v = tensors = inputs()
    centroids = torch.randn(H, 3, D)

    def normed(x: Row) -> Row:
        mean = sum(x) / D
        spread = math.sqrt(sum((a - mean) ** 2 for a in x) / D + 1e-5)
        return [(a - mean) / spread for a in x]

    due = []
    for h in range(H):
        rows, keys = ([normed(x) for x in columns(y)[n]] for y, n in ((q, h), (k, h // 2)))
        values, mu = columns(v)[h // 2], centroids[h].double().tolist()
        if strict:
            own = [max(range(3), key=lambda c: (dot(rows[i], mu[c]) + dot(keys[i], mu[c]), -c)) for i in range(T)]
            clusters = [({i for i in range(T) if own[i] == c},) * 2 for c in range(3)]
        else:
            clusters = [tuple(best([dot(x, m) for x in xs], 5) for xs in (rows, keys)) for m in mu]
        outs = []
        for i in range(T):
            found = [
                attend(rows[i], keys, values, {j for j in of_keys if j <= i}, D**-0.5) for of_q, of_keys in clusters if i in of_q
            ]
            outs.append([sum(o[c] for o in found) / max(len(found), 1) for c in range(DV)])
        due.append(outs)
    run = lambda q, k, v, backend: ap.routing(  # noqa: E731
        q, k, v, centroids, rt.CAUSAL, strict=strict, width=None if strict else 5, backend=backend
    )[0]
    compare(run, tensors, due)


@pytest.mark.parametrize("unit", ["token", "page"])
def test_loki(unit: str) -> None:
    """2406.02542, algorithm 1, with half of the dimensions and 6 of 13 keys; a group of heads chooses two pages of 4."""
    q, k, v = inputs()
    q = q[:, -1:]
    loki = ap.Loki.fit(k, dims=0.5, keep=6 / T)
    p = loki.p.double().tolist()

    def turned(x: Row, head: int) -> Row:
        return [sum(x[d] * p[head][d][c] for d in range(D)) for c in range(D)]

    due: list[list[Row]] = []
    for hk in range(HK):
        keys, values = columns(k)[hk], columns(v)[hk]
        heads = [columns(q)[h][0] for h in (2 * hk, 2 * hk + 1)]
        scores = [[dot(turned(x, hk)[:2], turned(key, hk)[:2]) for key in keys] for x in heads]
        shares = [[math.exp(s / 2) / sum(math.exp(t / 2) for t in row) for s in row] for row in scores]
        pages = best([sum(row[j] for row in shares for j in range(n, min(n + 4, T))) for n in range(0, T, 4)], 2)
        for x, row in zip(heads, scores, strict=True):
            seen = best(row, 6) if unit == "token" else {j for j in range(T) if j // 4 in pages}
            due.append([attend(x, keys, values, seen, D**-0.5)])
    compare(lambda q, k, v, backend: loki.attend(q, k, v, unit=unit, page=4, backend=backend), (q, k, v), due)


def test_native_sparse() -> None:
    """2502.11089, section 3.3: blocks of 4 tokens every 2 are compressed by their mean, and 3 blocks of 6 are selected."""
    n = 25
    q, k, v = inputs(n)
    gates = torch.rand(1, n, H, 3)
    compressed = [[[[sum(x[c] for x in rows[i : i + 4]) / 4 for c in range(len(rows[0]))] for i in range(0, n - 3, 2)]
                   for rows in columns(x)] for x in (k, v)]  # fmt: skip
    due = []
    for h, rows in enumerate(columns(q)):
        hk = h // 2
        keys, values, kc, vc = columns(k)[hk], columns(v)[hk], compressed[0][hk], compressed[1][hk]
        outs = []
        for t in range(n):
            complete = [i for i in range(len(kc)) if 2 * i + 3 <= t]
            shares = [0.0] * len(kc)
            for x in (columns(q)[2 * hk][t], columns(q)[2 * hk + 1][t]):
                terms = [math.exp(dot(x, kc[i]) / 2) for i in complete]
                for i, term in zip(complete, terms, strict=True):
                    shares[i] += term / sum(terms)
            own = t // 6
            # the paper's sum, counted from 0: key (l'/s) j + a - b for a < l'/s = 3 and b < l/s = 2
            places = [[3 * j + a - b for a in range(3) for b in range(2)] for j in range(own + 1)]
            score = [sum(shares[i] for i in js if 0 <= i < len(kc)) for js in places]
            always = {0, own, max(own - 1, 0)}
            chosen = always | best([-1.0 if j in always else s for j, s in enumerate(score)], 4 - len(always))
            branches = (
                attend(rows[t], kc, vc, complete, D**-0.5),
                attend(rows[t], keys, values, [j for j in range(t + 1) if j // 6 in chosen], D**-0.5),
                attend(rows[t], keys, values, [j for j in range(t + 1) if t - j < 5], D**-0.5),
            )
            outs.append([sum(g * o[c] for g, o in zip(gates[0, t, h].tolist(), branches, strict=True)) for c in range(DV)])
        due.append(outs)

    def run(q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        pair = ap.compress(k, length=4, stride=2), ap.compress(v, length=4, stride=2)
        sizes = {"length": 4, "stride": 2, "block_size": 6, "count": 4, "window": 5}
        return ap.native_sparse(q, pair, (k, v), (k, v), gates.to(q.dtype), backend=backend, **sizes)

    compare(run, (q, k, v), due)
