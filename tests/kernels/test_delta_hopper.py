"""The delta rule's walks in Gluon, run in Python: outputs against the definition, the rest against formulas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.recurrent import definitions

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.recurrent.kernels.delta import call, launch_hopper, walk_back_hopper, walk_hopper, walks  # noqa: E402
from tests.kernels.emulated_copies import compiled_copies, emulate_copies, record  # noqa: E402
from tests.kernels.test_sampling_compiles import stack  # noqa: E402
from tests.kernels.test_state_space_compiles import ROOM  # noqa: E402

SHAPES = record("D", "DV", "OUTPUTS", "KEEPS", "WALKERS")
TILES = record("queries", "values", "systems", "pairs", "lines")


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {"Shape": SHAPES, "Tiles": TILES, "LINES": 4, "FIRST_LINE": 2}
    monkeypatch.setattr(call, "_has_gluon", lambda device: True)
    yield from emulate_copies(
        monkeypatch, (walk_hopper, walk_back_hopper), (walk_hopper._walk_columns, walk_back_hopper._walk_columns_back),
        (launch_hopper._kernel, launch_hopper._kernel_back), **names,
    )  # fmt: skip


def prepared(given: tuple[Tensor, ...], state: Tensor) -> call.Chunks:
    """The chunks of a call as the kernels before the walk write them."""
    q, k, v, g, beta = given
    batch, T, Hk, D = q.shape
    H, DV = v.shape[-2:]
    chunks = -(-T // 64)
    scale = D**-0.5

    def cut(x: Tensor) -> Tensor:
        padded = torch.zeros(batch, chunks * 64, *x.shape[2:], dtype=torch.float64)
        padded[:, :T] = x.double()
        return padded.view(batch * chunks, 64, *x.shape[2:]).movedim(2, 1)

    here = cut(torch.ones(batch, T, H))
    Q, K = (cut(x).repeat_interleave(H // Hk, 1) for x in (q, k))
    unit, factor = ((x.square().sum(-1) + 1e-6).rsqrt() * here for x in (K, Q))
    factor = factor * scale
    total = cut(g).cumsum(-1)
    lower = torch.ones(64, 64, dtype=torch.bool).tril()
    decay = torch.where(lower, total[..., :, None] - total[..., None, :], -torch.inf).exp()
    pairs = factor[..., None] * (Q @ K.mT) * unit[..., None, :] * decay
    m = (cut(beta) * unit)[..., None] * (K @ K.mT) * unit[..., None, :] * decay
    x = torch.linalg.inv(m.tril(-1) + torch.eye(64, dtype=torch.float64))
    grown, left = total.exp(), (total[..., -1:] - total).exp()
    vectors = torch.stack([unit, factor, cut(beta), grown * unit, left * unit, grown * factor]).float()
    strides = [x.stride()[:3] for x in given]
    return call.Chunks(
        list(given), state, k, strides, (H, H // Hk, D, DV, q.dtype, True), {"QK_NORM": True, "PACKED": False}, T, batch * chunks,
        batch, x.bfloat16().contiguous(), pairs.bfloat16(), total, vectors, total[..., -1].exp().float(),
    )  # fmt: skip


def inputs(batch: int, T: int, Hk: int, H: int, D: int, DV: int) -> tuple[tuple[Tensor, ...], Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, T, *rest).bfloat16() for rest in ((Hk, D), (Hk, D), (H, DV)))
    return (q, k, v, -torch.rand(batch, T, H) * 0.1, torch.rand(batch, T, H)), torch.randn(batch, H, D, DV)


def assert_near(found: Tensor, due: Tensor) -> None:
    assert found.shape == due.shape
    assert (found.double() - due.double()).norm() <= 8e-3 * due.double().norm()


CASES = [(2, 130, 1, 2, 128, 128, 2), (1, 200, 2, 2, 64, 64, 1), (2, 61, 1, 1, 128, 128, 1), (1, 64, 1, 3, 64, 128, 2)]


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("batch", "T", "Hk", "H", "D", "DV", "walkers"), CASES)
def test_the_walk_equals_the_definition(
    batch: int, T: int, Hk: int, H: int, D: int, DV: int, walkers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, state = inputs(batch, T, Hk, H, D, DV)
    monkeypatch.setattr(call, "processors", lambda device: 0 if walkers == 2 else 1 << 20)
    chunks = prepared(given, state)
    assert chunks.suits_warpgroups
    assert chunks.walkers == walkers
    y = torch.full_like(given[2], float("nan"))
    last = walks.walk(chunks, y)
    y_due, last_due = definitions.gated_delta(*(x.double() for x in given), state=state.double())
    assert_near(y, y_due)
    assert_near(last, last_due)
    assert torch.equal(walks.walk(chunks), last)
    new, states = torch.full_like(y, float("nan")), torch.full((chunks.slots, H, D, DV), float("nan")).bfloat16()
    assert_near(walks.walk(chunks, None, states, new), last_due)
    for n in range(chunks.slots):
        b, i = divmod(n, chunks.slots // batch)
        before = state.double()
        if i:
            _, before = definitions.gated_delta(*(x[:, : i * 64].double() for x in given), state=before)
        assert_near(states[n], before[b])
        k, v, beta = ((x[b, i * 64 : i * 64 + 64].double().movedim(1, 0)) for x in (given[1], given[2], given[4]))
        k = k.repeat_interleave(H // Hk, 0)
        count = k.shape[1]
        right = v - chunks.vectors[3, n, :, :count, None].double() * (k @ before[b])
        found = new[b, i * 64 : i * 64 + 64].movedim(1, 0)
        assert_near(found, chunks.x[n, :, :count, :count].double() @ (right * beta[..., None]))


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("batch", "T", "Hk", "H", "D", "DV", "walkers"), CASES)
@pytest.mark.parametrize("has_last", [False, True])
def test_the_walk_back_equals_its_formulas(
    batch: int, T: int, Hk: int, H: int, D: int, DV: int, walkers: int, has_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, state = inputs(batch, T, Hk, H, D, DV)
    monkeypatch.setattr(call, "processors", lambda device: 0 if walkers == 2 else 1 << 20)
    chunks = prepared(given, state)
    dy = torch.randn(batch, T, H, DV).bfloat16()
    d_last = torch.randn_like(state) if has_last else None
    dr, d_states = torch.full_like(dy, float("nan")), torch.full((chunks.slots, H, D, DV), float("nan")).bfloat16()
    d_first = torch.full_like(state, float("nan"))
    walks.walk_back(chunks, dy, dr, d_states, d_last, d_first)
    _, _, beta, recall, left, reach = chunks.vectors.double()[..., None]
    each = chunks.slots // batch
    for b in range(batch):
        back = torch.zeros(H, D, DV, dtype=torch.float64) if d_last is None else d_last[b].double()
        for i in reversed(range(each)):
            n = b * each + i
            assert_near(d_states[n], back)
            q, k, gradient = (x[b, i * 64 : i * 64 + 64].double().movedim(1, 0) for x in (given[0], given[1], dy))
            q, k = (x.repeat_interleave(H // Hk, 0) for x in (q, k))
            count = k.shape[1]
            pairs, system = (x[n, :, :count, :count].double() for x in (chunks.pairs, chunks.x))
            due = system.mT @ (pairs.mT @ gradient + left[n, :, :count] * (k @ back))
            assert_near(dr[b, i * 64 : i * 64 + 64].movedim(1, 0), due)
            back = chunks.end[n, :, None, None] * back + q.mT @ (reach[n, :, :count] * gradient)
            back -= k.mT @ ((beta * recall)[n, :, :count] * due)
        assert_near(d_first[b], back)
    alone = torch.full_like(state, float("nan"))
    walks.walk_back(chunks, dy, None, None, d_last, alone)
    assert torch.equal(alone, d_first)


WALKS = [
    (False, True, False, 1, 128), (False, True, False, 2, 128), (False, False, True, 2, 128), (False, False, False, 2, 128),
    (True, True, True, 1, 128), (True, False, True, 2, 128), (True, True, True, 1, 64), (True, True, False, 2, 128),
]  # fmt: skip


@pytest.mark.parametrize(("back", "flag", "keeps", "walkers", "dim"), WALKS)
def test_walks_compile_for_hopper_and_spill_nothing(back: bool, flag: bool, keeps: bool, walkers: int, dim: int) -> None:
    kernel, name = (walk_back_hopper._walk_columns_back, "HAS_LAST") if back else (walk_hopper._walk_columns, "OUTPUTS")
    made = launch_hopper._kernel_back(dim, keeps) if back else launch_hopper._kernel(dim, keeps)
    stages = 2 if back and walkers == 2 else launch_hopper.STAGES
    own = launch_hopper._constants(32, 2, dim, 128, walkers, stages, KEEPS=keeps, **{name: flag})
    built = compiled_copies(kernel, made, own)
    # products of a chunk, 16 numbers at a time
    products = dim // 16 + 16 if back else (dim // 16 + 4) * (1 + flag) + 4
    assert built.asm["ptx"].count("wgmma.mma_async") == walkers * products
    assert stack(built) <= ROOM
    assert built.metadata.shared <= 227 * 1024
