"""`rooftile bench approximate`: every method runs small on a CPU beside exact attention and its peers, each checked first."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

import rooftile as rt
from rooftile import approximate as ap
from rooftile.cost import approximate as cost
from rooftile.cost import flops
from rooftile.exact.cases import Case
from rooftile_lab.bench.methods import crossover, peers
from rooftile_lab.bench.methods.check import Check, relative
from rooftile_lab.bench.methods.table import WAYS, WHOLE, sizes_of
from rooftile_lab.bench.methods.way import Sizes, double, drawn
from rooftile_lab.bench.methods.ways import as_pages
from rooftile_lab.bench.suites import approximate
from tests.bench.session import SESSION

CPU = torch.device("cpu")


def quiet(words: str) -> None:
    """No progress."""


@pytest.mark.parametrize("name", WAYS)
def test_every_method_is_measured_beside_exact_attention(name: str, ticking) -> None:
    way = WAYS[name]
    found = list(approximate.measure(SESSION, [f"{name}-96"], quiet))
    timed = [row for row in found if row.median_us is not None]
    assert [row.phase for row in timed if row.backend == "rooftile"] == list(way.phases)
    assert [row.phase for row in timed if row.backend == "exact"] == list(way.phases)
    sizes = sizes_of(way, "cpu", 96)
    for row in timed:
        assert (row.suite, row.case, row.peak_bytes) == ("approximate", f"{name}-96", 7)
        assert row.measures["of_exact_ratio"] == 1
        if row.backend == "rooftile":
            assert row.error is not None
            assert row.error < 1e-5
            due = way.cost(sizes, row.phase, 4)
        if row.backend == "exact":
            case = Case(
                name="", tags=frozenset(), B=1, T=1 if row.phase == "decode" else 96, S=96, H=sizes.H, Hk=sizes.Hk, dim=64,
                mask=rt.FULL if name == "linformer" else rt.CAUSAL,
            )  # fmt: skip
            work = flops.count(case.problem(), "bwd" if row.phase == "bwd" else "fwd")
            due = due._replace(flops=work)
        if row.backend in ("rooftile", "exact"):
            assert row.measures["counted_flops"] == pytest.approx(due.flops, rel=1e-5)
            assert row.tflops == pytest.approx(due.flops / 5.5e6, rel=1e-5)
        if row.backend == "rooftile":
            assert row.measures["compulsory_bytes"] == pytest.approx(due.bytes_moved, rel=1e-5)


class Slower:
    """A clock on which every work takes 10 µs longer than the one before."""

    peak_kind = "counted"

    def __init__(self) -> None:
        self.us = 0.0

    def samples(self, work) -> list[float]:
        self.us += 10
        return [self.us]

    def peak_bytes(self, work) -> int:
        return 0


def test_the_ratio_is_the_speed_over_that_of_exact_attention(ticking, monkeypatch) -> None:
    monkeypatch.setattr(approximate, "clock_for", lambda device: Slower())
    found = {row.backend: row for row in approximate.measure(SESSION, ["loki-64"], quiet) if row.median_us is not None}
    assert (found["rooftile"].median_us, found["exact"].median_us) == (10, 20)
    assert found["rooftile"].measures["of_exact_ratio"] == 2
    assert found["exact"].measures["of_exact_ratio"] == 1
    monkeypatch.setattr(crossover, "clock_for", lambda device, turn_ms: Slower())
    assert crossover.timed(SESSION, WAYS["loki"], "decode", 64, 1)["rooftile"].measures["of_exact_ratio"] == 2


@pytest.mark.parametrize("name", WHOLE)
def test_a_cost_is_that_of_its_phase_and_settings(name: str) -> None:
    """Numbers by hand: 512 tokens of 4 heads of 64, a backward of 2.5 forwards where only pairs count."""
    way, sizes = WAYS[name], Sizes(1, 512, 4, 4, 64)
    pairs = {
        "strided": 128 * 129 // 2 + 384 * 128 + sum(i // 128 for i in range(128, 512)),
        "reformer": 2 * 512 * 256, "routing": 64 * 8 * 8,
    }  # fmt: skip
    if name in pairs:
        assert way.cost(sizes, "bwd", 4).flops == 2.5 * 4 * 64 * 4 * pairs[name]
    elif name == "linear":
        assert way.cost(sizes, "fwd", 4) == (4 * 64 * 64 * 512 * 4, 4 * 512 * 4 * 64 * 4)
        assert way.cost(sizes, "bwd", 4).flops == 10 * 64 * 64 * 512 * 4
    elif name == "loki":
        # one query: a quarter of the dimensions of all keys, the turn, and a quarter of the keys
        assert way.cost(sizes, "decode", 4).flops == 4 * (2 * 512 * 16 + 2 * 64 * 64 + 4 * 64 * 128)
    else:
        assert way.cost(sizes, "bwd", 4).flops > 2 * way.cost(sizes, "fwd", 4).flops


def test_peers_that_are_left_out_have_a_row_that_says_why(ticking) -> None:
    found = {row.backend: row for row in approximate.measure(SESSION, ["strided-64", "reformer-64", "linformer-64"], quiet)}
    assert found["flex"].reason == "refused: tensors are on cpu; is compiled for CUDA here"
    assert found["reformer-pytorch"].reason.startswith("not timed: ")
    assert found["product and sdpa"].median_us == 5.5


def test_a_peer_that_is_wrong_in_its_gradients_alone_is_not_timed(ticking, monkeypatch) -> None:
    right = peers._product_and_sdpa(WAYS["linformer"])

    def wrong(x):
        o = right(x)
        return o.detach() + 2 * (o - o.detach())

    def raises(x):
        raise ValueError("no kernel")

    false = [
        peers.Peer(name, ("linformer",), lambda device: None, lambda way, run=run: run)
        for name, run in (("w", wrong), ("r", raises))
    ]
    monkeypatch.setattr(peers, "PEERS", (*peers.PEERS, *false))
    rows = {(row.backend, row.phase): row for row in approximate.measure(SESSION, ["linformer-64"], quiet)}
    assert rows["w", "fwd"].reason.startswith("wrong: relative error 1 in bwd")
    assert rows["r", "bwd"].reason == "failed: ValueError: no kernel"
    assert rows["product and sdpa", "bwd"].reason == ""


@pytest.fixture
def fake_fla(monkeypatch) -> None:
    """A package `fla` that computes by our functions, and may run on a CPU."""
    fla, ops, linear, nsa = (ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.linear_attn", "fla.ops.nsa"))
    fla.__spec__ = ModuleSpec("fla", None)
    linear.chunk_linear_attn = lambda q, k, v, scale, normalize: (
        scale * ap.linear(q, k, v, rt.CAUSAL, feature="identity", normalise=normalize),
        None,
    )

    def parallel_nsa(q, k, v, *, g_slc, block_indices, block_counts, block_size, window_size, scale):
        assert window_size == 0
        assert block_indices.dtype == torch.int64
        assert block_indices.shape[-1] == block_counts
        return ap.selected_attention(q, k, v, block_indices.int(), block=block_size, scale=scale) * g_slc[..., None]

    nsa.parallel_nsa = parallel_nsa
    for module in (fla, ops, linear, nsa):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers, "_needs_cuda", lambda device: None)
    # a compiled FlexAttention takes minutes on a CPU
    monkeypatch.setattr(peers, "PEERS", tuple(peer for peer in peers.PEERS if peer.name != "flex"))


def test_flash_linear_attention_is_found_and_checked(ticking, fake_fla, monkeypatch) -> None:
    names = ["linear-64", "performer-64", "nsa-selected-64"]
    rows = {(row.case, row.backend, row.phase): row for row in approximate.measure(SESSION, names, quiet)}
    for name, peer in zip(names, ("fla", "features and fla", "fla"), strict=True):
        for phase in ("fwd", "bwd"):
            assert rows[name, peer, phase].median_us == 5.5
            assert rows[name, peer, phase].error < 1e-5
    right = sys.modules["fla.ops.nsa"].parallel_nsa
    # values that are right, with gradients that are not
    monkeypatch.setattr(sys.modules["fla.ops.nsa"], "parallel_nsa", lambda q, k, v, **rest: right(q, k, v.detach(), **rest))
    rows = {(row.backend, row.phase): row for row in approximate.measure(SESSION, ["nsa-selected-64"], quiet)}
    assert rows["fla", "fwd"].median_us is None
    assert rows["fla", "fwd"].reason.startswith(("wrong: ", "failed: "))


def test_without_the_package_a_row_says_how_to_get_it(ticking, monkeypatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    rows = {row.backend: row for row in approximate.measure(SESSION, ["nsa-selected-64"], quiet)}
    assert rows["fla"].reason == "refused: not installed; pip install flash-linear-attention"


def test_an_error_of_ours_is_not_hidden(ticking, monkeypatch) -> None:
    monkeypatch.setattr(ap, "linear", lambda *a, backend=None, **b: torch.zeros(3) if backend is None else rt.attention(*a[:3]))
    with pytest.raises((RuntimeError, ValueError)):
        list(approximate.measure(SESSION, ["linear-64"], quiet))


def test_errors_are_those_of_the_output_and_of_the_worst_gradient() -> None:
    check = Check(WAYS["linear"], CPU, torch.float32, 40)
    found = check.errors(lambda x: WAYS["linear"].run(x) * 1.01)
    assert found["fwd"] == pytest.approx(0.01, rel=1e-2)
    assert found["bwd"] == pytest.approx(0.01, rel=1e-2)
    assert check.complaint(found) is not None
    assert check.complaint(check.errors(WAYS["linear"].run)) is None
    assert check.complaint({"fwd": float("nan")}) is not None
    assert relative(torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 4])) == 0.25


def test_a_case_names_texts_and_tokens() -> None:
    assert approximate.parsed("nsa-groups-of-4-8x2k", "cuda") == (WAYS["nsa-groups-of-4"], Sizes(8, 2048, 32, 8, 128))
    assert approximate.parsed("nsa-64k", "cuda")[1] == Sizes(1, 65_536, 64, 4, 128)
    assert approximate.parsed("linear-512", "cpu")[1] == Sizes(1, 512, 4, 4, 64)
    assert sizes_of(WAYS["nsa"], "cpu", 70, small=True) == Sizes(1, 70, 16, 1, 64)
    assert sizes_of(WAYS["linear"], "cuda", 70, small=True) == Sizes(1, 70, 2, 2, 128)
    for name in (*approximate.GPU, *approximate.CPU):
        assert approximate.parsed(name, "cuda")[0].name == name.rpartition("-")[0]


def test_branches_of_native_sparse_attention_are_the_parts_of_the_whole() -> None:
    sizes = {"B": 2, "T": 300, "S": 333, "H": 8, "Hk": 2, "D": 16, "Dv": 16}
    for phase in ("fwd", "bwd"):
        parts = [cost.native_sparse_branch(**sizes, branch=branch, phase=phase, count=4).flops for branch in cost.BRANCHES]
        assert sum(parts) == cost.native_sparse(**sizes, phase=phase, count=4).flops
    choice = cost.native_sparse_branch(**sizes, branch="choice", count=4)
    # the scores are one of the two products of the compressed branch
    assert 2 * choice.flops == cost.native_sparse_branch(**sizes, branch="compressed").flops
    selected, near = (cost.native_sparse_branch(**sizes, branch=branch, count=4) for branch in ("selected", "near"))
    # four int32 per query and key head
    assert selected.bytes_moved - near.bytes_moved == 4 * 4 * 2 * 300 * 2
    assert choice.bytes_moved == 2 * (2 * 300 * 8 * 16 + 2 * 19 * 2 * 16) + 4 * 2 * 300 * 2 * 4


def test_the_exact_rows_of_loki_read_the_same_cache_in_pages() -> None:
    q, k, v = drawn(Sizes(2, 64, 8, 2, 16), CPU, torch.float32)
    paged = rt.attention_paged(q[:, -1:], as_pages(k, v, 16), rt.CAUSAL)
    torch.testing.assert_close(paged, WAYS["loki"].exact(q, k, v))


def test_doubling_leaves_indices_and_objects_alone() -> None:
    x = WAYS["routing"].chosen(WAYS["routing"].tensors(*drawn(Sizes(1, 70, 2, 2, 16), CPU, torch.float32)))
    wide = double(x)
    assert {leaf.dtype for leaf in wide.leaves} == {torch.float64}
    assert wide.beside[0].dtype == torch.float64
    assert wide.choices is x.choices


def test_the_ways_that_users_choose_among_cover_the_methods() -> None:
    assert set(WHOLE) <= set(WAYS)
    assert set(crossover.NAMES) <= set(WAYS)
    assert len(WHOLE) == len(ap.METHODS) + 1  # strided and fixed are one method
