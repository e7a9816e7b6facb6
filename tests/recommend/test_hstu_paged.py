"""HSTU attention over pages: against packed attention, in plain operations and in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.kvcache import PagedKV
from rooftile.kvcache.operators import LARGEST, gathered_as_defined
from rooftile.recommend import RelativeBias, hstu_attention, hstu_attention_paged, time_edges
from tests.recommend.hstu_cases import D64, MASKS

BACKEND = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "tiled"
# events in pages, and rows: users without events, with events alone, and with a history of more than a tile
LENGTHS = (5, 0, 70, 1, 33, 0)
EVENTS = (3, 0, 20, 1, 0, 0)
CANDIDATES = (2, 3, 20, 0, 1, 0)
ERRORS = {D64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


class Case(NamedTuple):
    """A call's tensors and keywords."""

    q: Tensor
    cache: PagedKV
    words: dict[str, Any]

    def run(self, backend: str | None = None) -> Tensor:
        return hstu_attention_paged(self.q, self.cache, backend=backend, **self.words)

    def wide(self) -> Case:
        """The same numbers in fp64, with what the pages hold."""
        cache = self.cache
        k, v = cache.k.to(D64), cache.v.to(D64)
        if cache.k_scale is not None and cache.v_scale is not None:
            k, v = k * cache.k_scale.double()[..., None], v * cache.v_scale.double()[..., None]
        words = dict(self.words)
        if words.get("candidates") is not None:
            words["candidates"] = tuple(x.to(D64) for x in words["candidates"])
        if "bias" in words:
            bias = words["bias"]
            words["bias"] = RelativeBias(bias.positions.double(), bias.times.double(), bias.edges, bias.zero)
        return Case(self.q.to(D64), _with(cache, k, v), words)


def _with(cache: PagedKV, k: Tensor, v: Tensor) -> PagedKV:
    return PagedKV(k, v, cache.table, cache.lengths, cache.cu_q)


def case(
    mask: str = "causal", candidates: bool = False, bias: bool = False, *, lengths: tuple[int, ...] = LENGTHS,
    rows: tuple[int, ...] | None = None, H: int = 2, D: int = 24, Dv: int = 16, size: int = 8, pages: str = "fp32",
    dtype: torch.dtype = torch.float32, zero: int = 0,
) -> Case:  # fmt: skip
    """Users in shuffled blocks; slots that hold nothing are NaN."""
    if rows is None:
        rows = CANDIDATES if candidates else EVENTS
    counts = [-(-n // size) for n in lengths]
    blocks = sum(counts) + 3
    order = torch.randperm(blocks).int()
    table = torch.full((len(lengths), max(counts)), 0, dtype=torch.int32)
    k, v = (torch.full((blocks, size, H, dim), torch.nan) for dim in (D, Dv))
    seconds = torch.full((blocks, size), -(10**12))
    scales = [torch.full((blocks, size, H), torch.nan) for _ in range(2)] if FORMATS[pages] in LARGEST else [None, None]
    if scales[0] is not None:
        k, v = k.nan_to_num(1.0), v.nan_to_num(1.0)
    for b, n in enumerate(lengths):
        table[b, : counts[b]] = order[sum(counts[:b]) : sum(counts[: b + 1])]
        at = table[b, torch.arange(n) // size].long(), torch.arange(n) % size
        seconds[at] = torch.randint(0, 1000, (n,)).sort().values + 10**9
        for x, scale in zip((k, v), scales, strict=True):
            x[at] = torch.randn(n, *x.shape[2:])
            if scale is not None:
                scale[at] = x[at].abs().amax(-1) / LARGEST[FORMATS[pages]]
                x[at] = (x[at] / scale[at][..., None]).clamp(-LARGEST[FORMATS[pages]], LARGEST[FORMATS[pages]])
    if pages == "int8":
        k, v = k.round(), v.round()
    cu = torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32)
    total = int(cu[-1])
    q = torch.randn(total, H, D).to(dtype)
    cache = PagedKV(
        k.to(FORMATS[pages]), v.to(FORMATS[pages]), table, torch.tensor(lengths, dtype=torch.int32), cu, scales[0], scales[1]
    )
    words: dict[str, Any] = {"alpha": 0.3, "scale": 1 / 40, "mask": MASKS[mask]}
    if candidates:
        words["candidates"] = torch.randn(total, H, D).to(dtype), torch.randn(total, H, Dv).to(dtype)
    if bias:
        times = []
        for b, n in enumerate(lengths):
            own = seconds[table[b, torch.arange(n) // size].long(), torch.arange(n) % size]
            later = int(own[-1]) + 50 if n else 7
            times.append(torch.full((rows[b],), later) if candidates else own[n - rows[b] :])
        words["bias"] = RelativeBias(torch.randn(1, 30), torch.randn(H, 9), time_edges(9), zero)
        words |= {"times": torch.cat(times), "key_times": seconds}
    return Case(q, cache, words)


def assert_near(found: Tensor, exact: Tensor, error: float) -> None:
    worst = (found.double() - exact).abs().max().item()
    assert worst <= error * max(exact.abs().max().item(), 1e-3), worst


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_the_definition_is_packed_attention(mask: str, candidates: bool) -> None:
    """Users without pages: rows of `hstu_attention`, whose targets are the candidates."""
    given = case(mask, candidates, True, size=4).wide()
    cache, words = given.cache, given.words
    k, v, cu_k = gathered_as_defined(cache.k, cache.v, cache.table, cache.lengths, None, None, D64)
    parts: list[list[Tensor]] = []
    last = []
    for b, n in enumerate(cache.lengths.tolist()):
        rows = slice(int(cache.cu_q[b]), int(cache.cu_q[b + 1]))
        at = cache.table[b, torch.arange(n) // 4].long(), torch.arange(n) % 4
        keys, values, times = k[cu_k[b] : cu_k[b + 1]], v[cu_k[b] : cu_k[b + 1]], words["key_times"][at]
        if candidates:
            own = *(x[rows] for x in words["candidates"]), words["times"][rows]
            keys, values, times = (torch.cat(x) for x in zip((keys, values, times), own, strict=True))
        before = keys.shape[0] - (rows.stop - rows.start)
        parts.append([torch.cat([torch.randn(before, 2, 24, dtype=D64), given.q[rows]]), keys, values, times])
        last.append(torch.arange(keys.shape[0]) >= before)
    q, k, v, times = (torch.cat(x) for x in zip(*parts, strict=True))
    cu = torch.tensor([0, *torch.tensor([len(x) for x in last]).cumsum(0)])
    targets = cache.cu_q.diff() if candidates else None
    due = hstu_attention(
        q, k, v, cu, alpha=0.3, scale=1 / 40, mask=MASKS[mask], bias=words["bias"], times=times, targets=targets, backend="tiled"
    )
    torch.testing.assert_close(given.run("eager"), due[torch.cat(last)])


@pytest.mark.parametrize("pages", FORMATS)
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_many_users(mask: str, candidates: bool, pages: str) -> None:
    check_rows_of_many_users(mask, candidates, pages, candidates == (pages in ("fp32", "fp8")))


def check_rows_of_many_users(mask: str, candidates: bool, pages: str, bias: bool) -> None:
    dtype = torch.float32 if pages in ("fp32", "int8") else torch.bfloat16
    given = case(mask, candidates, bias, pages=pages, dtype=dtype)
    y = given.run(BACKEND)
    assert y.dtype == dtype
    assert_near(y, given.wide().run("eager"), ERRORS[dtype])


@pytest.mark.parametrize("candidates", [False, True])
def test_a_long_history_is_cut_into_shares(candidates: bool) -> None:
    """More keys than a share of one program, beside short users and one without events; few rows, and many."""
    for rows in ((2, 1, 0, 3), (40, 2, 0, 70)):
        lengths = (1300, 3, 0, 2100)
        given = case("causal", candidates, True, lengths=lengths, rows=rows, size=16, D=16)
        assert_near(given.run(BACKEND), given.wide().run("eager"), 1e-5)


@pytest.mark.parametrize(("D", "Dv", "H"), [(32, 32, 1), (17, 5, 3), (64, 128, 2), (160, 96, 2)])
def test_head_dims_and_strides(D: int, Dv: int, H: int) -> None:
    given = case("window", True, True, D=D, Dv=Dv, H=H, zero=3)
    cache = given.cache
    k, v = (x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in (cache.k, cache.v))
    own = tuple(x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in given.words["candidates"])
    other = Case(given.q.transpose(0, 1).contiguous().transpose(0, 1), _with(cache, k, v), given.words | {"candidates": own})
    assert_near(other.run(BACKEND), given.wide().run("eager"), 1e-5)


def test_a_bad_candidate_reaches_no_other() -> None:
    given = case("causal", True, True)
    clean = given.run(BACKEND)
    k, v = (x.clone() for x in given.words["candidates"])
    q = given.q.clone()
    q[7], k[7], v[7] = torch.nan, torch.nan, torch.inf
    y = Case(q, given.cache, given.words | {"candidates": (k, v)}).run(BACKEND)
    others = torch.arange(len(q)) != 7
    assert y[7].isnan().all()
    assert torch.equal(y[others], clean[others])


def test_a_user_does_not_depend_on_its_neighbours() -> None:
    """Nor on their pages: the same bits alone, and beside users whose events are NaN."""
    given = case("causal", True, True, lengths=(40, 90, 40), rows=(3, 4, 5))
    y = given.run(BACKEND)
    cache = given.cache
    k, v = cache.k.clone(), cache.v.clone()
    for b in (0, 2):
        k[cache.table[b, :5].long()] = torch.nan
        v[cache.table[b, :5].long()] = torch.inf
    changed = Case(given.q, _with(cache, k, v), given.words).run(BACKEND)
    assert torch.equal(changed[3:7], y[3:7])
    assert changed[:3].isnan().all()


def test_nothing_to_compute() -> None:
    given = case("causal", rows=(0,) * 6)
    assert given.run(BACKEND).shape == (0, 2, 16)


@pytest.mark.skipif(BACKEND == "triton", reason="the same checks")
def test_bad_input_is_told_in_a_sentence() -> None:
    given = case("causal", True, True)
    words, cache = given.words, given.cache
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "candidates": ({"candidates": words["candidates"][:1]}, "must be a pair: keys"),
        "dtype of candidates": ({"candidates": tuple(x.double() for x in words["candidates"])}, "candidates' keys are"),
        "no times": ({"times": None}, "times is None"),
        "key times": ({"key_times": words["key_times"].int()}, r"key_times is .*; must be int64 \(P, size\)"),
        "times without a bias": ({"bias": None, "key_times": None}, "times came without a bias"),
        "key times without a table": ({"bias": None, "times": None}, "key_times came, and bias has no table of times"),
        "scale": ({"scale": None}, "scale is None"),
        "mask": ({"mask": "causal"}, "mask is 'causal'"),
        "targets": (
            {"mask": rt.CAUSAL & rt.Targets(2)},
            r"Targets\(2\).*; rows beside pages are targets if candidates= has them",
        ),
    }
    for change, due in bad.values():
        with pytest.raises(rt.InvalidInput, match=due) as error:
            hstu_attention_paged(given.q, cache, **(words | change))
        assert "\n" not in str(error.value)
    with pytest.raises(rt.InvalidInput, match=r"must be a rooftile.kvcache.PagedKV with offsets cu_q"):
        hstu_attention_paged(given.q, PagedKV(cache.k, cache.v, cache.table, cache.lengths), **words)
    with pytest.raises(rt.InvalidInput, match="without scales it must be a float"):
        hstu_attention_paged(given.q, _with(cache, cache.k.to(torch.int8), cache.v), **words)
    with pytest.raises(rt.InvalidInput, match=r"cache.k is torch.float32 and cache.v is torch.float64; they must agree"):
        hstu_attention_paged(given.q, _with(cache, cache.k, cache.v.double()), **words)
    with pytest.raises(rt.InvalidInput, match="with the 2 heads of q"):
        hstu_attention_paged(given.q, _with(cache, cache.k[:, :, :1], cache.v), **words)
    with pytest.raises(rt.InvalidInput, match=r"user 0 has 3 rows and 2 events; its rows are the last of them"):
        hstu_attention_paged(*case("causal", lengths=(2,), rows=(3,))[:2], alpha=1.0, scale=1.0)
    with pytest.raises(rt.Unsupported, match="has no gradient"):
        hstu_attention_paged(given.q.requires_grad_(), cache, **words)
