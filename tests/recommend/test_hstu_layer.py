"""The layer and the recommender: the formula, candidates together and one by one, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rooftile as rt
from rooftile import recommend
from rooftile.nn import HSTU
from rooftile.recommend import HSTURecommender, stochastic_length, time_edges


def test_the_layer_is_the_formula_of_the_paper() -> None:
    """One user, written out: u, v, q, k in this order; the gate behind the second norm; the sum divided by the padded length."""
    n, H, D, A = 12, 2, 8, 4
    layer = HSTU(16, H, head_dim=D, attention_dim=A, positions=6, buckets=5, scale=1 / 32).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x, times = torch.randn(n, 16, dtype=torch.float64), torch.arange(n) * 2
    u, v, q, k = F.silu(layer.project(layer.norm(x))).split((H * D, H * D, H * A, H * A), dim=-1)
    v, q, k = v.view(n, H, D), q.view(n, H, A), k.view(n, H, A)
    i = torch.arange(n)
    scores = torch.einsum("ihd,jhd->hij", q, k) * A**-0.5
    scores = scores + layer.position_table[:, (i[:, None] - i[None]).clamp(0, 5)]
    scores = scores + layer.time_table[:, torch.bucketize(times[:, None] - times[None], time_edges(5), right=True)]
    y = torch.einsum("hij,jhd->ihd", F.silu(scores).tril() / 32, v).flatten(1)
    mean, variance = y.mean(-1, keepdim=True), y.var(-1, unbiased=False, keepdim=True)
    due = x + layer.out((y - mean) / (variance + layer.eps).sqrt() * u)
    torch.testing.assert_close(layer(x, torch.tensor([0, n]), times=times), due)


@pytest.mark.parametrize("way", ["tiled", "eager"])
def test_candidates_together_are_candidates_one_by_one(way: str) -> None:
    model = HSTURecommender(50, dim=16, heads=2, layers=2, longest=40, buckets=6, dropout=0.0, backend=way).double()
    history, candidates = torch.randint(50, (20,)), torch.randint(50, (5,))
    times = torch.arange(21) * 100
    together = model(
        torch.cat([history, candidates]), torch.tensor([0, 25]), torch.cat([times, times[-1:].expand(4)]), targets=5
    )[20:]
    for n, candidate in enumerate(candidates):
        alone = model(torch.cat([history, candidate[None]]), torch.tensor([0, 21]), times, targets=1)
        torch.testing.assert_close(alone[-1], together[n])


def test_the_recommender_learns_a_users_interests() -> None:
    """Users have two groups of items that take turns: the best items of a state are those of the group whose turn it is."""

    def users(count: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(6, 24, (count,))
        groups = torch.randint(8, (count, 2))
        events = [groups[u, torch.arange(n) % 2] * 5 + torch.randint(5, (int(n),)) for u, n in enumerate(lengths)]
        return torch.cat(events), torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])

    model = HSTURecommender(40, dim=16, heads=2, layers=1, longest=24, buckets=0, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(250):
        loss = model.loss(*users(24), negatives=20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    events, cu = users(40)
    with torch.no_grad():
        best = model.scores(model(events, cu)[cu[1:] - 2]).argmax(-1)
    # by chance an eighth
    assert (best // 5 == events[cu[1:] - 1] // 5).float().mean() > 0.9


def test_the_loss_counts_the_next_events_alone() -> None:
    """Each state against its user's next event; the last event of a user has none."""
    model = HSTURecommender(30, dim=8, heads=1, layers=1, longest=10, buckets=0, dropout=0.0)
    events, cu = torch.randint(30, (9,)), torch.tensor([0, 4, 4, 5, 9])
    found = model.loss(events, cu, negatives=11, generator=torch.Generator().manual_seed(3))
    drawn = torch.randint(30, (11,), generator=torch.Generator().manual_seed(3))
    states = model(events, cu)
    losses = []
    for row in (0, 1, 2, 5, 6, 7):
        others = drawn[drawn != events[row + 1]]
        scores = model.scores(states[row], torch.cat([events[row + 1][None], others])) / 0.05
        losses.append(-scores.log_softmax(-1)[0])
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_stochastic_length() -> None:
    """Short users stay whole; long ones are whole or have m rows, in order, and as often as the paper says."""
    generator = torch.Generator().manual_seed(0)
    cu = torch.cat([torch.tensor([0, 10]), 10 + torch.arange(1, 2001) * 40])
    rows, offsets = stochastic_length(cu, 400, 1.0, generator=generator)
    lengths = offsets.diff()
    assert int(lengths[0]) == 10
    assert set(lengths[1:].tolist()) == {20, 40}
    # with probability (20 / 40)^2: 500 of 2000, within 5 deviations
    assert abs(int((lengths[1:] == 40).sum()) - 500) < 97
    assert (rows.diff() > 0).all()
    for b in (0, 1, 7):
        own = rows[offsets[b] : offsets[b + 1]]
        assert ((own >= cu[b]) & (own < cu[b + 1])).all()
    assert stochastic_length(cu, 400, 2.0)[0].shape[0] == int(cu[-1])


WRONG = {
    "mask is 'causal'; must be a mask": lambda: HSTU(8, 2, mask="causal"),  # type: ignore[arg-type]
    "backend is 'cuda'; must be": lambda: HSTU(8, 2, backend="cuda"),
    "scale is 'a'; must be a finite": lambda: HSTU(8, 2, scale="a"),  # type: ignore[arg-type]
    "eps is -1; must be at least 0": lambda: HSTU(8, 2, eps=-1),
    r"edges is \[1, 2\]": lambda: HSTU(8, 2, buckets=3, edges=[1, 2]),  # type: ignore[arg-type]
    "bias.edges makes 2 buckets": lambda: HSTU(8, 2, buckets=3, edges=torch.tensor([1])),
    "bias.edges falls": lambda: HSTU(8, 2, buckets=3, edges=torch.tensor([3, 1])),
    r"x is .*; must be a float tensor \(total, 8\)": lambda: HSTU(8, 2)(torch.randn(3, 9), torch.tensor([0, 3])),
    "dim is -4; must be an int": lambda: HSTURecommender(10, dim=-4),
    "items has the item 10": lambda: HSTURecommender(10, dim=8).scores(torch.randn(3, 8), torch.tensor([10])),
    r"states is .*; must be a tensor \(..., 8\)": lambda: HSTURecommender(10, dim=8).scores(torch.randn(3, 9)),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused(words: str) -> None:
    with pytest.raises(rt.InvalidInput, match=words):
        WRONG[words]()


def test_events_of_int32_and_a_dropout_of_numpy() -> None:
    model = HSTURecommender(10, dim=8, longest=4, buckets=0, dropout=np.float32(0.5)).eval()
    events, cu = torch.tensor([1, 2, 3]), torch.tensor([0, 3])
    losses = [model.loss(x, cu, generator=torch.Generator().manual_seed(0)) for x in (events, events.int())]
    assert torch.equal(*losses)


def test_bad_input() -> None:
    with pytest.raises(rt.InvalidInput, match="heads must divide dim"):
        HSTU(10, 3)
    with pytest.raises(rt.InvalidInput, match=r"dropout is 1\.5"):
        HSTU(8, 2, dropout=1.5)
    with pytest.raises(rt.InvalidInput, match="edges came, and buckets is 0; give buckets, or leave edges out"):
        HSTU(8, 2, edges=torch.tensor([5, 6]))
    x, cu = torch.randn(3, 8), torch.tensor([0, 3])
    with pytest.raises(rt.InvalidInput, match="times came, and the layer has no buckets; give it buckets, or leave times out"):
        HSTU(8, 2, positions=4)(x, cu, times=torch.arange(3))
    with pytest.raises(rt.InvalidInput, match="positions came, and the layer has no positions; give it positions, or leave"):
        HSTU(8, 2, buckets=4)(x, cu, times=torch.arange(3), positions=torch.arange(3))
    model = HSTURecommender(10, dim=8, heads=2, layers=1, longest=4, buckets=0)
    for call in (model, model.loss):
        with pytest.raises(rt.InvalidInput, match="times came, and the model has no buckets of time; give it buckets, or leave"):
            call(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.arange(2))
    model = HSTURecommender(10, dim=8, heads=2, layers=1, longest=4, buckets=3)
    with pytest.raises(rt.InvalidInput, match="times is None"):
        model(torch.tensor([1, 2]), torch.tensor([0, 2]))
    with pytest.raises(rt.InvalidInput, match="the item 10; items are 0 to 9"):
        model(torch.tensor([1, 10]), torch.tensor([0, 2]), torch.arange(2))
    with pytest.raises(rt.InvalidInput, match="a user has 5 events; longest is 4"):
        model(torch.arange(5), torch.tensor([0, 5]), torch.arange(5))
    with pytest.raises(rt.InvalidInput, match="no user has two events"):
        model.loss(torch.arange(2), torch.tensor([0, 1, 2]), torch.arange(2))
    with pytest.raises(rt.InvalidInput, match="power is 3"):
        stochastic_length(torch.tensor([0, 4]), 4, 3)


def test_a_saved_layer_is_the_layer() -> None:
    layer = HSTU(16, 2, positions=8, buckets=4)
    other = HSTU(16, 2, positions=8, buckets=4, edges=torch.tensor([5, 6, 7]))
    other.load_state_dict(layer.state_dict())
    x, cu, times = torch.randn(9, 16), torch.tensor([0, 9]), torch.arange(9)
    assert torch.equal(other(x, cu, times=times), layer(x, cu, times=times))
    assert recommend.HSTU is HSTU
