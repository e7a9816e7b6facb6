"""Properties of the tiled backend: NaN behind the mask, memory, bits, dropout. The cases run in tests/conformance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rooftile as rt
from rooftile.exact import reference
from rooftile.exact.backends import tiled
from rooftile.exact.backends.tiled import tiles
from rooftile.exact.cases import CASES
from rooftile.exact.masks import FULL, Mask, materialise
from rooftile.exact.reference.philox import keep_mask
from rooftile.exact.spec import BackwardInputs, Options, Spec
from tests.unit.poison import LENGTHS, MASKS, assert_nan_only_where_seen

CAUSAL, Chunk, Prefix, Window = rt.CAUSAL, rt.Chunk, rt.Prefix, rt.Window


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses tiles so small that a short sequence has full, partial and skipped ones."""
    monkeypatch.setattr(tiles, "ROWS", 32)
    monkeypatch.setattr(tiles, "KEYS", 16)
    monkeypatch.setattr(tiles, "SCORES", 2 * 32 * 16)


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "do"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nan_shows_where_it_is_seen_and_nowhere_else(
    mask: Mask, lengths: tuple[int, int], poisoned: str, small_tiles: None
) -> None:
    assert_nan_only_where_seen("tiled", mask, *lengths, poisoned)


@pytest.mark.parametrize("hidden", [False, True])
def test_nan_in_bias(hidden: bool, small_tiles: None) -> None:
    q, k, v, do = (torch.randn(1, 50, 2, 8) for _ in range(4))
    bias = torch.randn(1, 2, 50, 50)
    row, column = (20, 30) if hidden else (30, 20)
    clean = gradients(q, k, v, bias, do)
    bias[0, 1, row, column] = math.nan
    found = gradients(q, k, v, bias, do)
    if hidden:
        assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))
        return
    o, dq, dk, dv, dbias = found
    for rows in (o, dq):
        assert rows.isnan().nonzero()[:, 1:3].unique(dim=0).tolist() == [[row, 1]]
    for keys in (dk, dv):
        assert keys.isnan().all(-1).nonzero()[:, 1:3].tolist() == [[j, 1] for j in range(row + 1)]
    assert dbias.isnan().nonzero()[:, 1:].tolist() == [[1, row, j] for j in range(row + 1)]


def gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    o = rt.attention(*leaves[:3], CAUSAL, bias=leaves[3], backend="tiled")
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def test_a_huge_value_behind_the_mask_does_not_overflow_into_gradients() -> None:
    q, k, v, do = (torch.randn(1, 40, 1, 8) for _ in range(4))
    v[:, -1] = 3e38
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, _, _ = torch.autograd.grad(rt.attention(*leaves, CAUSAL, backend="tiled"), leaves, do * 100)
    assert dq[:, :-1].isfinite().all()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation created."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_nothing_as_large_as_the_matrix_of_scores_is_made(small_tiles: None) -> None:
    def largest(length: int) -> int:
        q, k, v, do = (torch.randn(1, length, 1, 8) for _ in range(4))
        sinks, slopes, bias = torch.randn(1), torch.rand(1), torch.randn(1, 1, 1, length)
        options = Options(bias, slopes, sinks, torch.tensor([7]))
        spec = Spec(
            dtype=torch.float32, dim=8, dim_v=8, scale=0.3, mask=Prefix(20), softcap=3.0, dropout=0.1, has_bias=True,
            has_alibi=True, has_sinks=True, needs_grad=True, bias_grad=True, needs_lse=True,
        )  # fmt: skip
        with Largest() as seen:
            o, lse = tiled.forward(q, k, v, options, spec)
            tiled.backward(BackwardInputs(do, torch.randn_like(lse), q, k, v, o, lse, options), spec)
        return seen.elements

    assert largest(128) < 128 * 128 / 8
    # linear: four times as long, at most four times as large
    assert largest(512) <= 4 * largest(128)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sequence_has_the_same_bits_whatever_its_neighbours(deterministic: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(3, 300, 4, 32, generator=generator) for _ in range(4))

    def run(rows: slice) -> list[Tensor]:
        leaves = [x[rows].clone().requires_grad_() for x in (q, k[..., :2, :], v[..., :2, :])]
        o, lse = rt.attention_with_lse(*leaves, CAUSAL, deterministic=deterministic, backend="tiled")
        return [o, lse, *torch.autograd.grad(o, leaves, do[rows])]

    alone, together = run(slice(2, 3)), run(slice(0, 3))
    assert all(torch.equal(a, b[2:]) for a, b in zip(alone, together, strict=True))


def test_a_packed_sequence_has_the_bits_of_the_same_dense_one() -> None:
    q, k, v = (torch.randn(170, 4, 32) for _ in range(3))
    cu = torch.tensor([0, 40, 170])
    packed = rt.attention_packed(q, k, v, cu, cu, CAUSAL & Window(50), backend="tiled")
    dense = rt.attention(q[None, 40:], k[None, 40:], v[None, 40:], CAUSAL & Window(50), backend="tiled")
    assert torch.equal(packed[40:], dense[0])


def test_dropout_drops_what_the_generator_says(small_tiles: None) -> None:
    B, T, S, H, seed, dropout = 2, 60, 50, 4, 1234, 0.3
    q, k = torch.randn(B, T, H, 8), torch.randn(B, S, 2, 8)
    # with one-hot values, o equals the weights
    v = torch.eye(S)[None, :, None].expand(B, S, 2, S)
    p = rt.attention(q, k, v, dropout=dropout, seed=seed, backend="tiled")  # (B, T, H, S)
    b, h, t, j = (torch.arange(n) for n in (B, H, T, S))
    kept = keep_mask(torch.tensor([seed]), dropout, b[:, None, None, None], h[:, None, None], t[:, None], j)
    assert torch.equal(p.transpose(1, 2) > 0, kept)
    assert 0 < kept.sum() < kept.numel()


@pytest.mark.parametrize("name", ["everything", "packed-everything", "two-chunks", "bias-keys", "bias-rows", "gqa5"])
def test_small_tiles_give_the_definition(name: str, small_tiles: None) -> None:
    case = CASES[name]
    tensors, mask, options = case.inputs()
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    seed = torch.tensor([options["seed"]]) if "seed" in options else None
    due = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()} | {"seed": seed}
    definition = reference.attention_packed if case.lengths else reference.attention
    o, lse = definition(*wide, mask, **due | {"softcap": case.softcap})
    attention = rt.attention_packed_with_lse if case.lengths else rt.attention_with_lse
    found = attention(*tensors, mask, **options, backend="tiled")
    torch.testing.assert_close(found[0].double(), o, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1].double(), lse, rtol=1e-5, atol=1e-5)


def test_fp64_is_computed_in_fp64() -> None:
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, dtype=torch.float64)
    options = {"softcap": 3.0, "alibi": slopes, "sinks": torch.randn(2, dtype=torch.float64, requires_grad=True)}
    o, lse = rt.attention_with_lse(q, k, v, Window(9, 4), **options, backend="tiled")
    due, due_lse = reference.attention(q, k, v, Window(9, 4), **options)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    leaves = (q, k, v, options["sinks"])
    found = torch.autograd.grad((o, lse), leaves, (do, dlse))
    expected = torch.autograd.grad((due, due_lse), leaves, (do, dlse))
    for a, b in zip((o, lse, *found), (due, due_lse, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_compiles_into_one_graph() -> None:
    q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q * 2, k, v, CAUSAL, softcap=3.0, backend="tiled").sin()

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    found, due = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, program))
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"device": "sm90"}, "tensors are on sm90; has cpu"),
        ({"forward_mode": True}, "forward-mode or second derivatives; has gradients (use backend='eager')"),
        ({}, None),
    ],
)
def test_refusals(what: dict, reason: str | None) -> None:
    spec = Spec(dtype=torch.bfloat16, dim=80, dim_v=48, group=5, mask=FULL, scale=1.0, **what)
    assert list(tiled.refusals(spec)) == ([reason] if reason else [])


def test_hidden_pairs_are_what_the_mask_hides() -> None:
    for mask in MASKS:
        for T, S in LENGTHS:
            due = ~materialise(mask, T, S)
            walked = torch.ones_like(due)
            for t, t_stop in tiles.query_tiles(T, group=4):
                for tile in tiles.key_tiles(mask, t, t_stop, T, S):
                    part = tiles.hidden_pairs(mask, tile, T, S)
                    assert tile.partial or not part.any()
                    walked[tile.t : tile.t_stop, tile.s : tile.s_stop] = part
            assert torch.equal(walked, due), (mask, T, S)
