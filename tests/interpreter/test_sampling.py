"""The sampler's kernels, interpreted: the sets and tokens of the definition."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton.language as tl
from torch import Tensor

from rooftile.engine.sampling import sampling_kernels
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.sampler import (
    SamplingFeatures,
    SamplingState,
    features_of,
    penalised,
    sample_as_defined,
    thresholds,
)
from tests.engine.sampling import HOSTILE, KINDS, MAY, Batch, assert_nothing_is_drawn, assign
from tests.grids import swept

# masked lanes take a logarithm of 0, and NaN is compared, on purpose
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PARAMS = list(KINDS.values())
DTYPES = (torch.float32, torch.bfloat16)


def kept(logits: Tensor, slots: Tensor, state: SamplingState, features: SamplingFeatures) -> tuple[Tensor, Tensor]:
    """Returns the tokens that the kernel keeps, and those that the definition keeps."""
    x = penalised(logits, slots, state, features)
    return x >= sampling_kernels.thresholds(logits, slots, state, features)[:, None], x >= thresholds(x, slots, state)


@pytest.mark.parametrize(("vocab", "dtype"), swept(product((7, 1000, 2049, 9001), DTYPES), lambda case: case))
def test_the_kept_sets(vocab: int, dtype: torch.dtype) -> None:
    batch = Batch(PARAMS, vocab)
    features = SamplingFeatures(chance=True, truncation=True)
    for asked in (features, batch.features):
        found, due = kept(batch.logits.to(dtype), batch.index, batch.state, asked)
        assert torch.equal(found, due)
        assert not due.all()


TOP_K = [(k, digits) for k in (1, 64, 65, 149, 160, 161, 4097, 8999, 9000) for digits in (None, 0)]


# each k, and ties with few tokens and with many
@pytest.mark.parametrize(("k", "digits"), swept(TOP_K, lambda case: (case[0], (case[0] > 160, case[1]))))
def test_top_k_is_exact(k: int, digits: int | None) -> None:
    """Below, at and above the number of groups and the room of a copy; with ties, of which all stay."""
    V = 9000
    logits = torch.randn(3, V) * torch.tensor([[1.0], [100.0], [1e-3]])
    logits[1, torch.randperm(V)[:3000]] = -torch.inf
    if digits is not None:
        logits = logits.round(decimals=digits)
    state = SamplingState(3, V, "cpu")
    assign(state, [0, 1, 2], [SamplingParams(top_k=k)] * 3, [0, 1, 2], [[]] * 3, [[]] * 3)
    found, due = kept(logits, torch.arange(3), state, SamplingFeatures(True, True))
    assert torch.equal(found, due)


TOP_P = [(top_p, temperature) for temperature in (0.2, 1.0, 20.0) for top_p in (1e-6, 0.5, 0.9, 0.9999)]


# each of both numbers; the smallest and the largest top_p at each end of the temperatures
@pytest.mark.parametrize(
    ("top_p", "temperature"), swept(TOP_P, lambda case: (*case, case if case[1] != 1.0 and case[0] in (1e-6, 0.9999) else ()))
)
def test_top_p_is_exact_up_to_rounding(top_p: float, temperature: float) -> None:
    """The kept tokens reach top_p, and do not without the least likely one, up to fp32 rounding."""
    V = 9001
    logits = torch.randn(4, V) * torch.tensor([[0.1], [1.0], [3.0], [10.0]])
    state = SamplingState(4, V, "cpu")
    assign(state, [0, 1, 2, 3], [SamplingParams(top_p=top_p, temperature=temperature)] * 4, [0] * 4, [[]] * 4, [[]] * 4)
    found, due = kept(logits, torch.arange(4), state, SamplingFeatures(True, True))
    p = (logits.double() / temperature).softmax(1)
    for row in range(4):
        mass, least = p[row, found[row]].sum(), p[row, found[row]].min()
        assert mass >= top_p - 1e-6
        assert mass - least < top_p + 1e-6
        assert (found[row] != due[row]).sum() <= 1


def test_rows_that_do_not_ask_keep_everything() -> None:
    batch = Batch(PARAMS, 100)
    found = sampling_kernels.thresholds(batch.logits, batch.index, batch.state, batch.features)
    asks = torch.tensor([features_of(params).truncation for params in PARAMS])
    assert torch.equal(found > -torch.inf, asks)


@pytest.mark.parametrize(("vocab", "dtype"), swept(product((7, 1000, 2053), DTYPES), lambda case: case))
def test_tokens_and_counts(vocab: int, dtype: torch.dtype) -> None:
    batch, other = Batch(PARAMS, vocab), Batch(PARAMS, vocab)
    for step in range(2):
        rows = torch.randperm(len(PARAMS)).tolist()
        logits, slots, positions = batch.of(rows)
        logits = (logits + step).to(dtype)
        due = sample_as_defined(logits, slots, positions, batch.state, batch.features)
        assert torch.equal(sampling_kernels.sample(logits, slots, positions, other.state, batch.features), due)
        assert torch.equal(batch.state.counts, other.state.counts)
        batch.positions += 1


@pytest.mark.parametrize(
    "name", ["greedy", "all_three", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("plain", "penalties", "bias"))]
)
def test_each_kind_alone_draws_what_it_draws_among_others(name: str) -> None:
    row = list(KINDS).index(name)
    batch, alone = Batch(PARAMS, 2500), Batch(PARAMS, 2500)
    together = sampling_kernels.sample(batch.logits, batch.index, batch.positions, batch.state, batch.features)
    token = sampling_kernels.sample(*alone.of([row]), alone.state, features_of(KINDS[name]))
    assert token.item() == together[row]
    assert (
        token.item()
        == sample_as_defined(*Batch(PARAMS, 2500).of([row]), Batch(PARAMS, 2500).state, features_of(KINDS[name])).item()
    )


def test_logits_that_are_a_view() -> None:
    batch = Batch([KINDS["all_three"], KINDS["plain"]], 300)
    wide = torch.full((2, 512), 1e4)
    wide[:, :300] = batch.logits
    due = sample_as_defined(*batch.of([0, 1]), batch.state, batch.features)
    for view in (wide[:, :300], batch.logits.T.contiguous().T):
        assert torch.equal(sampling_kernels.sample(view, batch.index, batch.positions, batch.state, batch.features), due)
    assert sampling_kernels.sample(wide[:0, :300], batch.index[:0], batch.positions[:0], batch.state, batch.features).shape == (
        0,
    )


def test_equals_go_to_the_lowest_id_across_segments() -> None:
    state, logits = SamplingState(1, 9000, "cpu"), torch.zeros(1, 9000)
    logits[0, [8999, 4500, 2100, 2099]] = 1.0
    none = torch.tensor([0])
    assert sampling_kernels.sample(logits, none, none, state, SamplingFeatures()).item() == 2099


def test_rows_that_share_a_slot_are_all_counted() -> None:
    """Rows that fill a batch up to the size of a graph do."""
    state = SamplingState(1, 50, "cpu")
    state.prepare(SamplingFeatures(penalties=True))
    logits = torch.zeros(4, 50)
    logits[:, 9] = 1.0
    sampling_kernels.sample(logits, torch.zeros(4, dtype=torch.int64), torch.arange(4), state, SamplingFeatures(penalties=True))
    assert state.counts[0, 9] == 4
    assert state.counts.sum() == 4


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows(name: str) -> None:
    kinds = [KINDS[kind] for kind in ("greedy", "plain", "top_k", "top_p", "min_p", "all_three", "penalties")]
    kinds.append(SamplingParams(logit_bias={0: -1.0}, top_k=3))
    batch = Batch(kinds, 6)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([HOSTILE[name]] * len(kinds)).to(dtype)
        # the interpreter reads the smallest numbers of bf16 as 0
        if name != "huge" or dtype == torch.float32:
            found, due = kept(logits, batch.index, batch.state, batch.features)
            assert torch.equal(found, due)
        tokens = sampling_kernels.sample(logits, batch.index, batch.positions, batch.state, batch.features)
        assert set(tokens.tolist()) <= MAY[name]


def test_the_search_copes_with_any_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is a shortcut: without room, and with room for few, the sets are the same."""
    batch = Batch(PARAMS, 3000)
    _, due = kept(batch.logits, batch.index, batch.state, batch.features)
    for room in (1, 50, 600):
        with monkeypatch.context() as patch:
            patch.setattr(sampling_kernels, "ROOM", tl.constexpr(room))
            found, _ = kept(batch.logits, batch.index, batch.state, batch.features)
        assert torch.equal(found, due)


@pytest.mark.parametrize("room", [19, 20, 21])
def test_a_copy_that_is_just_full(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tokens lie in groups of their own: as many as are kept reach the bound."""
    monkeypatch.setattr(sampling_kernels, "ROOM", tl.constexpr(room))
    logits = torch.rand(1, 2048)
    logits[0, 63::64] += torch.arange(1.0, 33.0)
    state, none = SamplingState(1, 2048, "cpu"), torch.tensor([0])
    for params in (SamplingParams(top_k=20), SamplingParams(top_k=20, top_p=0.99, temperature=5.0)):
        assign(state, [0], [params], [0], [[]], [[]])
        found, due = kept(logits, none, state, SamplingFeatures(True, True))
        assert torch.equal(found, due)


def test_the_noise_of_every_segment() -> None:
    """With equal logits, only the noise decides, anywhere in the vocabulary."""
    V, n = 6001, 12
    state = SamplingState(1, V, "cpu")
    assign(state, [0], [SamplingParams()], [2**40 + 3], [[]], [[]])
    slots, positions = torch.zeros(n, dtype=torch.int64), torch.arange(n) + 2**33
    due = sample_as_defined(torch.zeros(n, V), slots, positions, state, SamplingFeatures(chance=True))
    assert set((due // 2048).tolist()) == {0, 1, 2}
    assert torch.equal(sampling_kernels.sample(torch.zeros(n, V), slots, positions, state, SamplingFeatures(chance=True)), due)


@pytest.mark.parametrize("kind", ["greedy", "all_three", "penalties"])
def test_a_row_without_a_token(kind: str) -> None:
    assert_nothing_is_drawn(sampling_kernels.sample, kind, "cpu")
