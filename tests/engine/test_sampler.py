"""The sampler draws from the distribution that was asked for, and from nothing that was not."""

from __future__ import annotations

import math

import pytest
import torch

from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.sampler import (
    SamplingFeatures,
    SamplingState,
    features_of,
    gumbel,
    logprobs,
    penalised,
    sample,
    thresholds,
    uniform,
)
from rooftile.errors import InvalidInput
from tests.engine import sampling
from tests.engine.sampling import HOSTILE, KINDS, MAY, Batch, allow, assert_nothing_is_drawn, assign, mask_of
from tests.unit.test_philox import philox


@pytest.mark.parametrize("vocab", [1, 2, 37, 400])
@pytest.mark.parametrize("name", KINDS)
def test_the_kept_set_is_the_definitions(name: str, vocab: int) -> None:
    """Against fp64 loops, on logits of many shapes; ties too."""
    params = KINDS[name]
    if params.logit_bias and vocab < 6:
        params = SamplingParams(logit_bias={0: 1.0})
    batch = Batch([params] * 12, vocab)
    batch.logits *= torch.linspace(0.1, 3, 12)[:, None]
    batch.logits[6:] = batch.logits[6:].round()
    features = features_of(params)
    x = penalised(batch.logits, batch.index, batch.state, features)
    keeps = x >= thresholds(x, batch.index, batch.state)
    for row, logits in enumerate(batch.logits.tolist()):
        due = sampling.penalised(logits, params, batch.prompts[row], batch.generated[row])
        torch.testing.assert_close(x[row].double(), torch.tensor(due).double(), rtol=1e-6, atol=1e-5)
        # the sets of what rounding to fp32 made of the scores
        if params.temperature > 0:
            assert keeps[row].tolist() == [p > 0 for p in sampling.distribution(x[row].tolist(), params)]
        else:
            assert keeps[row].all()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 7, 100])
def test_top_k_keeps_equals_of_the_kth(k: int) -> None:
    state = SamplingState(1, 7, "cpu")
    assign(state, [0], [SamplingParams(top_k=k)], [0], [[]], [[]])
    x = torch.tensor([[5.0, 1.0, 3.0, 3.0, 3.0, 9.0, -1.0]])
    kept = (x >= thresholds(x, torch.tensor([0]), state)).sum().item()
    assert kept == {1: 1, 2: 2, 3: 5, 4: 5, 6: 6, 7: 7, 100: 7}[k]


def test_top_p_reaches_its_share_and_no_more() -> None:
    x = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    state = SamplingState(1, 4, "cpu")
    for top_p, kept in ((1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (1.0, 4)):
        assign(state, [0], [SamplingParams(top_p=top_p)], [0], [[]], [[]])
        assert (x >= thresholds(x, torch.tensor([0]), state)).sum().item() == kept


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_are_the_probabilities(name: str) -> None:
    """Pearson's chi-square of 20,000 positions of one seed, five standard deviations from its mean."""
    n, vocab, params = 20_000, 24, KINDS[name]
    batch = Batch([params] * 3, vocab)
    row = 2
    x = sampling.penalised(batch.logits[row].tolist(), params, batch.prompts[row], batch.generated[row])
    due = torch.tensor(sampling.distribution(x, params), dtype=torch.float64) * n
    features = features_of(params)
    # what is drawn here must not be counted
    counts = None if batch.state.counts is None else batch.state.counts.clone()
    drawn = torch.zeros(vocab, dtype=torch.float64)
    for first in range(0, n, 2000):
        slots = torch.full((2000,), row)
        tokens = sample(batch.logits[[row] * 2000], slots, torch.arange(first, first + 2000), batch.state, features)
        drawn += torch.bincount(tokens, minlength=vocab)
        if counts is not None:
            batch.state.counts.copy_(counts)
    assert drawn[due == 0].sum() == 0
    # cells that expect fewer than five join
    few = due < 5
    cells = [(drawn[~few], due[~few])] + [(drawn[few].sum()[None], due[few].sum()[None])] * bool(due[few].sum() > 1)
    square = sum(((found - mean) ** 2 / mean).sum().item() for found, mean in cells)
    freedom = sum(len(mean) for _, mean in cells) - 1
    assert square <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


def test_the_noise_of_neighbouring_seeds_positions_and_tokens_is_unrelated() -> None:
    seeds, positions = torch.tensor([1, 2, 1 + 2**32, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 4, 2**32])
    u = uniform(seeds, positions, 40_000)
    assert u.min() > 0
    assert u.max() < 1
    assert (torch.corrcoef(u) - torch.eye(6)).abs().max() < 0.03
    folded = u.unflatten(1, (-1, 4)).transpose(1, 2).flatten(0, 1)
    assert (torch.corrcoef(folded) - torch.eye(24)).abs().max() < 0.06
    assert (u.double().mean(1) - 0.5).abs().max() < 0.01
    g = gumbel(seeds, positions, 40_000).double()
    assert (g.mean() - 0.5772156649).abs() < 0.02
    assert (g.var() - math.pi**2 / 6).abs() < 0.05


def test_the_bits_are_philox_of_token_and_position_keyed_by_the_seed() -> None:
    seed, position = 0x1234_5678_9ABC_DEF0, 0x7_0000_0003
    u = uniform(torch.tensor([seed]), torch.tensor([position]), 11)[0]
    for token in range(11):
        bits = philox([token // 4, position & 0xFFFFFFFF, position >> 32, 0], [seed & 0xFFFFFFFF, seed >> 32])[token % 4]
        assert u[token] == torch.tensor(bits / 2**32)


def test_the_noise_of_extreme_bits_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.engine.sampling import sampler

    for bits, bound in ((0, 22.9), (2**32 - 1, -2.9)):
        words = (torch.full((1, 1), bits),) * 4
        monkeypatch.setattr(sampler.philox, "words", lambda *_, words=words: words)
        noise = gumbel(torch.tensor([0]), torch.tensor([0]), 4)
        assert 0 < (bound - noise[0, 0].item()) * (1 if bound > 0 else -1) < 0.1


def test_the_noise_joins_its_series() -> None:
    """A series replaces -log(-log(1 - w)) where 1 - w loses the bits of w."""
    u = uniform(torch.arange(50), torch.arange(50), 4000)
    exact = -(-torch.log1p(-u.double())).log()
    assert (gumbel(torch.arange(50), torch.arange(50), 4000) - exact).abs().max() < 1e-5


def test_a_row_does_not_depend_on_its_slot_or_its_neighbours() -> None:
    params = list(KINDS.values())
    n = len(params)
    batch, elsewhere = Batch(params, 301), Batch(params, 301, slots=[2 * n - i for i in range(n)])
    together = sample(*batch.of(list(range(n))), batch.state, batch.features)
    order = torch.randperm(n).tolist()
    assert torch.equal(sample(*elsewhere.of(order), elsewhere.state, batch.features), together[order])
    alone = Batch(params, 301)
    for row, each in enumerate(params):
        # by itself a row wants less
        assert sample(*alone.of([row]), alone.state, features_of(each)).item() == together[row]


def test_another_seed_or_position_draws_another_token() -> None:
    state, vocab = SamplingState(2, 5000, "cpu"), 5000
    assign(state, [0, 1], [SamplingParams()] * 2, [7, 8], [[]] * 2, [[]] * 2)
    features, flat = SamplingFeatures(chance=True), torch.zeros(50, vocab)
    slots, positions = torch.zeros(50, dtype=torch.int64), torch.arange(50)
    first = sample(flat, slots, positions, state, features)
    assert torch.equal(sample(flat, slots, positions, state, features), first)
    assert len(set(first.tolist())) > 45
    assert (sample(flat, slots + 1, positions, state, features) == first).sum() < 3


def test_greedy_rows_take_the_first_of_the_largest_in_any_batch() -> None:
    params = [KINDS["greedy"], KINDS["everything"], KINDS["rewards"]]
    batch = Batch(params, 50)
    batch.logits[0, [9, 4, 30]] = 20.0
    for _ in range(5):
        x = penalised(batch.logits, batch.index, batch.state, batch.features)
        tokens = sample(*batch.of([0, 1, 2]), batch.state, batch.features)
        assert tokens[0] == 4
        assert tokens[2] == x[2].argmax()
        batch.positions += 1
    assert sample(*batch.of([0]), batch.state, SamplingFeatures()).item() == 4


def test_sampled_tokens_are_counted() -> None:
    """A reward that grows: what was said once is said for ever; a penalty that grows: nothing is said twice."""
    state = SamplingState(3, 8, "cpu")
    for penalty, kinds in ((-2.0, 1), (2.0, 8)):
        params = SamplingParams(temperature=0, frequency_penalty=penalty)
        assign(state, [2], [params], [0], [[]], [[]])
        logits = torch.linspace(0, 0.1, 8)[None]
        said = [sample(logits, torch.tensor([2]), torch.tensor([n]), state, features_of(params)).item() for n in range(8)]
        assert len(set(said)) == kinds
        assert state.counts is not None
        assert torch.equal(state.counts[2], torch.bincount(torch.tensor(said), minlength=8))
        assert state.counts[:2].sum() == 0


def test_a_slot_keeps_nothing_of_an_earlier_request() -> None:
    vocab = 60
    used, fresh = (SamplingState(4, vocab, "cpu") for _ in range(2))
    for params in KINDS.values():
        assign(used, [1, 3], [params] * 2, [5, 6], [[1, 2, 3], [4]], [[5, 5, 6], list(range(vocab))])
        assign(used, [3], [KINDS["everything"]], [9], [list(range(vocab))], [list(range(vocab))])
    allow(used, [1, 3], mask_of(vocab))
    for params in KINDS.values():
        assign(used, [3], [params], [11], [[7]], [[8, 8]])
        assign(fresh, [3], [params], [11], [[7]], [[8, 8]])
        for name in ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition", "seed", "biased"):
            assert getattr(used, name)[3] == getattr(fresh, name)[3], name
        for name in ("counts", "prompted", "bias", "masks"):
            if getattr(fresh, name) is not None:
                assert torch.equal(getattr(used, name)[3], getattr(fresh, name)[3]), name
        assign(used, [3], [KINDS["everything"]], [9], [list(range(vocab))], [list(range(vocab))])
        fresh = SamplingState(4, vocab, "cpu")


def test_a_resumed_request_goes_on_as_if_it_had_not_been_preempted() -> None:
    vocab, steps = 40, 12
    torch.manual_seed(3)
    logits = torch.randn(steps, 1, vocab)
    for name in ("penalties", "everything", "rewards", "plain"):
        params, prompt = KINDS[name], [1, 2, 3]
        whole: list[int] = []
        state = SamplingState(2, vocab, "cpu")
        assign(state, [0], [params], [77], [prompt], [[]])
        for n in range(steps):
            whole += sample(logits[n], torch.tensor([0]), torch.tensor([3 + n]), state, features_of(params)).tolist()
        for stop in (1, 5, 11):
            said = whole[:stop]
            assign(state, [1], [params], [77], [prompt], [said])
            for n in range(stop, steps):
                said = said + sample(logits[n], torch.tensor([1]), torch.tensor([3 + n]), state, features_of(params)).tolist()
            assert said == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows(name: str, kind: str) -> None:
    params = KINDS[kind]
    if params.logit_bias:
        params = SamplingParams(logit_bias={0: -1.0}, top_k=3)
    logits = torch.tensor([HOSTILE[name]] * 30)
    state = SamplingState(1, 6, "cpu")
    assign(state, [0], [params], [1], [[0, 1]], [[2]])
    features = features_of(params)
    assert (penalised(logits, torch.zeros(30, dtype=torch.int64), state, features) < torch.inf).all()
    tokens = sample(logits, torch.zeros(30, dtype=torch.int64), torch.arange(30), state, features)
    assert set(tokens.tolist()) <= MAY[name]
    assert (
        set(sample(logits.bfloat16(), torch.zeros(30, dtype=torch.int64), torch.arange(30), state, features).tolist())
        <= MAY[name]
    )


@pytest.mark.parametrize("kind", ["greedy", "plain", "all_three", "penalties", "masked"])
def test_a_row_without_a_token(kind: str) -> None:
    """It is told apart, is not counted, and leaves the next step a token that the model has."""
    assert_nothing_is_drawn(sample, kind, "cpu")


def test_extreme_parameters() -> None:
    params = [
        SamplingParams(temperature=1e-300), SamplingParams(temperature=1e300), SamplingParams(repetition_penalty=1e-300),
        SamplingParams(repetition_penalty=1e300), SamplingParams(top_k=2**63 - 1, top_p=1e-300), SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-30, top_p=0.5, min_p=0.1), SamplingParams(temperature=1e300, top_p=0.5),
    ]  # fmt: skip
    for vocab in (1, 9):
        batch = Batch(params, vocab)
        tokens = sample(*batch.of(list(range(len(params)))), batch.state, batch.features)
        assert (tokens >= 0).all()
        assert (tokens < vocab).all()
        for row in (0, 4, 5, 6):
            assert tokens[row] == batch.logits[row].argmax()
    # so hot that all tokens are as likely
    hot = sample(
        torch.arange(9.0).expand(900, 9),
        torch.ones(900, dtype=torch.int64),
        torch.arange(900),
        batch.state,
        SamplingFeatures(chance=True),
    )
    assert torch.bincount(hot, minlength=9).min() > 60


def test_seeds_of_64_bits() -> None:
    state = SamplingState(3, 500, "cpu")
    assign(state, [0, 1, 2], [SamplingParams()] * 3, [2**63 - 1, 2**63, 0], [[]] * 3, [[]] * 3)
    tokens = sample(torch.zeros(3, 500), torch.arange(3), torch.zeros(3, dtype=torch.int64), state, SamplingFeatures(chance=True))
    assert len(set(tokens.tolist())) == 3


def test_what_is_wanted() -> None:
    assert features_of(KINDS["greedy"]) == SamplingFeatures()
    assert features_of(SamplingParams(temperature=0, top_k=5, top_p=0.1, min_p=0.5)) == SamplingFeatures()
    assert features_of(KINDS["plain"]) == SamplingFeatures(chance=True)
    assert features_of(KINDS["rewards"]) == SamplingFeatures(penalties=True)
    assert features_of(KINDS["bias"]) == SamplingFeatures(chance=True, bias=True)
    assert features_of(KINDS["masked"]) == SamplingFeatures(True, True, True, False, True)
    for only in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert features_of(SamplingParams(**only)) == SamplingFeatures(chance=True, truncation=True)
    for only in ({"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 2}):
        assert features_of(SamplingParams(**only)) == SamplingFeatures(chance=True, penalties=True)
    union = SamplingFeatures(True, False, True, False) | SamplingFeatures(False, True, True, False, True)
    assert union == SamplingFeatures(True, True, True, False, True)
    assert len({SamplingFeatures(), SamplingFeatures(bias=True), SamplingFeatures(bias=True)}) == 2


def test_tables_are_made_when_they_are_wanted() -> None:
    state = SamplingState(2, 30, "cpu")
    assign(state, [0], [KINDS["all_three"]], [0], [[1]], [[2]])
    assert (state.counts, state.prompted, state.bias, state.masks) == (None, None, None, None)
    assign(state, [0], [KINDS["penalties"]], [0], [[1]], [[2]])
    assert state.bias is None
    counts = state.counts
    assign(state, [0, 1], [KINDS["everything"]] * 2, [0, 1], [[1]] * 2, [[2]] * 2)
    assert state.counts is counts
    assert state.bias is not None
    assert state.masks is None
    assign(state, [1], [KINDS["masked"]], [0], [[1]], [[]])
    assert state.masks is not None


def test_a_token_that_the_model_has_not_is_refused() -> None:
    state = SamplingState(1, 30, "cpu")
    for params, prompt in (
        (KINDS["penalties"], [30]),
        (KINDS["penalties"], [-1]),
        (SamplingParams(logit_bias={31: 1.0}), []),
    ):
        with pytest.raises(InvalidInput, match="the model has 0 to 29"):
            assign(state, [0], [params], [0], [prompt], [[]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab", "k"), [(5, 100, 4), (1, 3, 20), (7, 50, 0), (0, 10, 2)])
def test_logprobs(n: int, vocab: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.engine.sampling import sampler

    # a piece of two rows
    monkeypatch.setattr(sampler, "MOST_NUMBERS", 2 * vocab + 1)
    logits, tokens = (torch.randn(n, vocab) * 4).to(dtype), torch.randint(vocab, (n,))
    chosen, ids, top, ranks = logprobs(logits, tokens, k)
    due = torch.log_softmax(logits.double(), 1)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(chosen.double(), due.gather(1, tokens[:, None])[:, 0], **close)
    torch.testing.assert_close(top.double(), due.topk(min(k, vocab), dim=1).values, **close)
    torch.testing.assert_close(due.gather(1, ids), top.double(), **close)
    for row in range(n):
        assert ranks[row] == 1 + sum(value > due[row, tokens[row]] for value in due[row])
        assert len(set(ids[row].tolist())) == min(k, vocab)
    assert (chosen.dtype, top.dtype, ids.dtype, ranks.dtype) == (torch.float32, torch.float32, torch.int64, torch.int64)
