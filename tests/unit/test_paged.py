"""Attention to a paged KV cache equals attention to the same keys and values in dense tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rooftile as rt
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.masks import Mask
from rooftile.kvcache import BlockPool, Copy, PagedKV, Pages

BACKENDS = ["eager", "tiled"]
backends = pytest.mark.parametrize("name", BACKENDS)
MASKS = [rt.FULL, rt.CAUSAL, rt.CAUSAL & rt.Window(9), rt.Prefix(20) & rt.Window(30, 30), rt.Chunk(16) & rt.CAUSAL]
LENGTHS = (37, 5, 0, 64, 1)


def paged(sequences: list[tuple[Tensor, Tensor]], size: int, seed: int = 0, spare: int = 3) -> PagedKV:
    """Builds a cache with blocks in random order, and NaN in unwritten slots."""
    lengths = [len(k) for k, _ in sequences]
    counts = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(seed)).int()
    k, v = (torch.full((len(order), size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in sequences[0])
    # table entries past a sequence's end are not blocks
    table = torch.full((len(sequences), max(counts) + 1), 10**6, dtype=torch.int32)
    for b, (keys, values) in enumerate(sequences):
        start = sum(counts[:b])
        table[b, : counts[b]] = order[start : start + counts[b]]
        for n in range(lengths[b]):
            k[table[b, n // size], n % size], v[table[b, n // size], n % size] = keys[n], values[n]
    return PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32))


def sequences(lengths: tuple[int, ...] = LENGTHS, Hk: int = 2, D: int = 16, Dv: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, Hk, D), torch.randn(n, Hk, Dv)) for n in lengths]


@backends
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("size", "T"), [(16, 1), (8, 5), (64, 3), (1, 1)])
def test_dense_queries(name: str, mask: Mask, size: int, T: int) -> None:
    held = sequences()
    q = torch.randn(len(held), T, 4, 16)
    options = {"softcap": 5.0, "sinks": torch.randn(4), "alibi": torch.rand(4), "scale": 0.3}
    o, lse = rt.attention_paged_with_lse(q, paged(held, size), mask, backend=name, **options)
    assert torch.equal(o, rt.attention_paged(q, paged(held, size, seed=1), mask, backend=name, **options))
    for b, (k, v) in enumerate(held):
        due, due_lse = rt.attention_with_lse(q[b : b + 1], k[None], v[None], mask, backend="eager", **options)
        torch.testing.assert_close(o[b : b + 1], due)
        torch.testing.assert_close(lse[b : b + 1], due_lse)


@backends
def test_packed_queries_of_prompts_and_decoding_together(name: str) -> None:
    held = sequences()
    counts = torch.tensor([20, 1, 0, 64, 1])
    cu_q = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    q = torch.randn(int(cu_q[-1]), 4, 16)
    plain = paged(held, 16)
    cache = PagedKV(plain.k, plain.v, plain.table, plain.lengths, cu_q)
    o, lse = rt.attention_paged_with_lse(q, cache, rt.CAUSAL, backend=name)
    for b, (k, v) in enumerate(held):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        due, due_lse = rt.attention_with_lse(q[None, rows], k[None], v[None], rt.CAUSAL, backend="eager")
        torch.testing.assert_close(o[rows], due[0])
        torch.testing.assert_close(lse[:, rows], due_lse[0])


def test_without_a_name_the_cpu_has_one() -> None:
    q = torch.randn(5, 1, 2, 16)
    assert torch.isfinite(rt.attention_paged(q, paged(sequences(), 16), rt.CAUSAL)).all()
    with pytest.raises(Unsupported, match="layout 'paged'; has 'dense'"):
        rt.attention_paged(q, paged(sequences(), 16), backend="sdpa")


def test_a_pool_and_its_pages() -> None:
    """Two samples of one prompt share its blocks, and neither reads the tokens of the other."""
    pool, pages = BlockPool(8, 4), Pages(8, layers=2, heads=2, dim=16, block_size=4, dtype=torch.float32)
    pages.storage.fill_(torch.nan)
    k, v = torch.randn(2, 2, 6, 2, 16)
    first = pool.begin([1])
    pool.append(first, 6)

    def write(table, start: int, k: Tensor, v: Tensor) -> None:
        slots = torch.tensor([table.blocks[n // 4] * 4 + n % 4 for n in range(start, start + k.shape[1])])
        for layer in range(2):
            pages.write(layer, k[layer], v[layer], slots)

    write(first, 0, k, v)
    second = pool.fork(first)
    more = {}
    for table in (first, second):
        pages.copy(pool.append(table, 1))
        more[table] = torch.randn(2, 2, 1, 2, 16)
        write(table, 6, *more[table])
    assert pool.used_blocks == 3
    tables = torch.tensor([first.blocks, second.blocks], dtype=torch.int32)
    q = torch.randn(2, 1, 4, 16)
    for layer in range(2):
        o = rt.attention_paged(q, PagedKV(*pages.layer(layer), tables, torch.tensor([7, 7], dtype=torch.int32)), rt.CAUSAL)
        for b, table in enumerate((first, second)):
            keys, values = (torch.cat((x[layer], x_more[layer])) for x, x_more in zip((k, v), more[table], strict=True))
            torch.testing.assert_close(o[b : b + 1], rt.attention(q[b : b + 1], keys[None], values[None], rt.CAUSAL))


def test_copies_are_as_if_one_after_the_other() -> None:
    pages = Pages(5, layers=1, heads=1, dim=1, block_size=1, dtype=torch.float32)
    pages.storage[:] = torch.arange(5.0).view(5, 1, 1, 1, 1, 1)

    def held() -> list[float]:
        k, v = pages.layer(0)
        assert torch.equal(k, v)
        return k.flatten().tolist()

    pages.copy([Copy(0, 3), Copy(1, 4)])
    assert held() == [0, 1, 2, 0, 1]
    pages.copy([Copy(1, 0), Copy(0, 2)])
    assert held() == [1, 1, 1, 0, 1]
    pages.copy([])
    assert str(pages).endswith("= 40 bytes")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"table": torch.zeros(5, 4)}, r"cache.table is torch.float32 \(5, 4\); must be int32"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)}, r"cache.lengths is torch.int32 \(4,\); must be int32 \(5,\)"),
        ({"lengths": torch.full((5,), 99, dtype=torch.int32)}, r"cache.lengths has 99; cache.table has room for 80"),
        ({"table": torch.full((5, 5), 50, dtype=torch.int32)}, r"names blocks 50 to 50; cache.k has 0 to"),
        ({"k": torch.zeros(12, 16, 2, 16).half()}, r"cache.k is torch.float16; q is torch.float32"),
        ({"k": torch.zeros(12, 16, 3, 16), "v": torch.zeros(12, 16, 3, 8)}, r"q has 4 heads and cache.k has 3"),
        ({"k": torch.zeros(12, 12, 2, 16), "v": torch.zeros(12, 12, 2, 8)}, r"blocks of 12 tokens; their size must be a power"),
        ({"v": torch.zeros(3, 16, 2, 8)}, r"cache.v is \(3, 16, 2, 8\); must be like cache.k"),
        ({"cu_q": torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)}, r"queries are packed, so it must have 3 axes"),
    ],
)
def test_bad_input(change: dict[str, Tensor], sentence: str) -> None:
    plain = paged(sequences(), 16)
    given = {name: getattr(plain, name) for name in ("k", "v", "table", "lengths", "cu_q")} | change
    with pytest.raises(InvalidInput, match=sentence):
        rt.attention_paged(torch.randn(5, 1, 4, 16), PagedKV(**given), rt.CAUSAL)


def test_other_bad_input() -> None:
    cache = paged(sequences(), 16)
    with pytest.raises(InvalidInput, match=r"must be a rooftile\.kvcache\.PagedKV"):
        rt.attention_paged(torch.randn(5, 1, 4, 16), cache.k)
    with pytest.raises(InvalidInput, match=r"q has batch 4; cache\.table has 5 rows"):
        rt.attention_paged(torch.randn(4, 1, 4, 16), cache)
    o = rt.attention_paged(torch.randn(5, 1, 4, 16, requires_grad=True), cache)
    with pytest.raises(rt.Unsupported, match=r"under torch\.no_grad"):
        o.sum().backward()


def sharing(Hk: int = 2, size: int = 16, prefix: int = 48) -> tuple[PagedKV, list[tuple[Tensor, Tensor]]]:
    """Builds three sequences that begin with the same blocks."""
    head = (torch.randn(prefix, Hk, 16), torch.randn(prefix, Hk, 8))
    tails = [(torch.randn(n, Hk, 16), torch.randn(n, Hk, 8)) for n in (30, 5, 16)]
    cache = paged([head, *tails], size)
    shared = cache.table[:1, : prefix // size].expand(3, -1)
    table = torch.cat([shared, cache.table[1:, :-1]], 1)
    lengths = cache.lengths[1:] + prefix
    whole = [tuple(torch.cat([a, b]) for a, b in zip(head, tail, strict=True)) for tail in tails]
    return PagedKV(cache.k, cache.v, table, lengths), whole


@backends
@pytest.mark.parametrize("mask", [rt.FULL, rt.CAUSAL], ids=str)
@pytest.mark.parametrize("prefix", [16, 48])
def test_a_shared_prefix_is_read_once_and_merged(name: str, mask: Mask, prefix: int) -> None:
    cache, whole = sharing()
    options = {"softcap": 5.0, "sinks": torch.randn(4), "scale": 0.3}
    q = torch.randn(3, 5, 4, 16)
    found = rt.attention_paged_with_lse(q, cache, mask, shared_prefix=prefix, backend=name, **options)
    for b, (k, v) in enumerate(whole):
        due = rt.attention_with_lse(q[b : b + 1], k[None], v[None], mask, backend="eager", **options)
        torch.testing.assert_close((found[0][b : b + 1], found[1][b : b + 1]), due)
    counts = torch.tensor([0, 5, 6, 8], dtype=torch.int32)
    packed = PagedKV(cache.k, cache.v, cache.table, cache.lengths, counts)
    rows = torch.cat([q[0], q[1, -1:], q[2, -2:]])
    o = rt.attention_paged(rows, packed, mask, shared_prefix=prefix, backend=name, **options)
    torch.testing.assert_close(o, torch.cat([found[0][0], found[0][1, -1:], found[0][2, -2:]]))


def test_a_prefix_that_is_not_shared_is_refused() -> None:
    cache, _ = sharing()
    q = torch.randn(3, 5, 4, 16)
    for change, sentence in (
        ({"shared_prefix": 20}, "shared_prefix is 20; must be whole blocks of 16 tokens, up to 96 in cache.table"),
        ({"shared_prefix": 112}, "shared_prefix is 112; must be whole blocks"),
        ({"shared_prefix": 16, "mask": rt.CAUSAL & rt.Window(9)}, "every query must see the prefix whole"),
        ({"shared_prefix": 16, "alibi": torch.rand(4)}, "shared_prefix with alibi"),
        ({"shared_prefix": 64}, "cache.table differs in the first 4 blocks of its rows"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            rt.attention_paged(q, cache, **{"mask": rt.CAUSAL} | change)
    with pytest.raises(InvalidInput, match="a sequence has fewer tokens before its queries"):
        rt.attention_paged(torch.randn(3, 9, 4, 16), cache, rt.CAUSAL, shared_prefix=48)


def in_fp8(cache: PagedKV) -> tuple[PagedKV, PagedKV]:
    """Returns the cache in FP8 with scales, and its dequantised numbers."""
    parts, plain = [], []
    for x in (cache.k, cache.v):
        scale = x.abs().amax(-1) / 448
        x8 = (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
        parts.append((x8, scale))
        plain.append(x8.float() * scale.unsqueeze(-1))
    (k, k_scale), (v, v_scale) = parts
    quantised = PagedKV(k, v, cache.table, cache.lengths, cache.cu_q, k_scale, v_scale)
    return quantised, PagedKV(*plain, cache.table, cache.lengths, cache.cu_q)


@backends
def test_a_cache_in_fp8_is_times_its_scales(name: str) -> None:
    quantised, plain = in_fp8(paged(sequences(), 16))
    q = torch.randn(5, 3, 4, 16)
    found = rt.attention_paged_with_lse(q, quantised, rt.CAUSAL, backend=name)
    torch.testing.assert_close(found, rt.attention_paged_with_lse(q, plain, rt.CAUSAL, backend=name))
    with pytest.raises(InvalidInput, match=r"cache.v_scale is None; must be torch.float32"):
        rt.attention_paged(q, replace(quantised, v_scale=None))
    with pytest.raises(InvalidInput, match=r"cache.k is torch.float8_e4m3fn; q is torch.float32"):
        rt.attention_paged(q, replace(quantised, k_scale=None, v_scale=None))
    with pytest.raises(InvalidInput, match=r"cache.k is torch.float32; with scales it must be torch.float8_e4m3fn"):
        rt.attention_paged(q, replace(plain, k_scale=quantised.k_scale, v_scale=quantised.v_scale))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiler_sees_one_operator(packed: bool, fp8: bool, dynamic: bool) -> None:
    """Compiles without graph breaks, with every option, and once: other lengths compile nothing."""
    torch._dynamo.reset()
    cache = paged(sequences(D=16, Dv=16), 16)
    if packed:
        cache = replace(cache, cu_q=torch.tensor([0, 5, 6, 6, 14, 15], dtype=torch.int32))
    if fp8:
        cache, _ = in_fp8(cache)
    q = torch.randn(15, 4, 16) if packed else torch.randn(5, 3, 4, 16)
    options = {"sinks": torch.randn(4), "alibi": torch.rand(4)}

    def program(q: Tensor, cache: PagedKV) -> Tensor:
        return rt.attention_paged(q * 2, cache, rt.CAUSAL, softcap=5.0, **options) + 1

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(program, fullgraph=True, backend=counter, dynamic=dynamic)
    torch.testing.assert_close(compiled(q, cache), program(q, cache))
    shorter = replace(cache, lengths=torch.tensor([36, 5, 0, 60, 1], dtype=torch.int32))
    torch.testing.assert_close(compiled(q, shorter), program(q, shorter))
    assert counter.frame_count == 1


def test_pages_in_fp8() -> None:
    """Keys and values are within a sixteenth, and zeros stay zeros; copies include the scales."""
    pages = Pages(6, layers=2, heads=2, dim=16, block_size=4, dtype=torch.float8_e4m3fn)
    k, v = torch.randn(2, 5, 2, 16)
    k[2, 1] = 0
    k[3] *= 1e4
    pages.write(1, k, v, torch.tensor([0, 1, 2, 3, -1]))
    pages.copy([Copy(0, 5), Copy(5, 2)])
    for block in (0, 5, 2):
        cache = pages.view(1, torch.tensor([[block]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32))
        found_k, found_v, _ = cache.gathered(torch.float32)
        for found, due in ((found_k, k[:4]), (found_v, v[:4])):
            assert ((found - due).abs() <= due.abs() / 16 + due.abs().amax(-1, keepdim=True) / 448 / 64).all()
    assert not found_k[2, 1].any()
    assert str(pages).endswith("2 x 2 heads x (16 bytes + 4 of scale) = 3.84 kB")
