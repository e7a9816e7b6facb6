"""The recommender of target attention against its formula in plain operations, its searches, and a task that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.recommend import TargetRecommender, time_edges
from rooftile.recommend.data import planted_clicks
from rooftile.recommend.metrics import auc

ITEMS, DIM, HEADS, BUCKETS = 40, 12, 2, 5
CATEGORIES = torch.arange(ITEMS) // 8


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Events of users with 9, 0 and 23 events, candidates, seconds, and the time at which candidates are shown."""
    generator = torch.Generator().manual_seed(1)
    events = torch.randint(ITEMS, (32,), generator=generator)
    candidates = torch.randint(ITEMS, (3, 5), generator=generator)
    seconds = torch.randint(4000, (32,), generator=generator).cumsum(0)
    return events, torch.tensor([0, 9, 9, 32]), candidates, seconds, torch.tensor([40_000, 7, 200_000])


def plain(model: TargetRecommender, now: Tensor | None, last: int, top_k: int | None, search: str | None) -> Tensor:
    """The logits of `problem`, a candidate and a head at a time."""
    events, cu, candidates, seconds, _ = problem()

    def embedded(item: Tensor) -> Tensor:
        assert model.category_embedding is not None
        return model.embedding.weight[item] + model.category_embedding.weight[CATEGORIES[item]]

    rows = []
    for user in range(3):
        begin, end = max(int(cu[user]), int(cu[user + 1]) - last), int(cu[user + 1])
        own = embedded(events[begin:end])
        keys, values = model.key(own).view(-1, HEADS, DIM // HEADS), model.value(own).view(-1, HEADS, DIM // HEADS)
        for item in candidates[user]:
            asked, found = embedded(item), torch.zeros(HEADS, DIM // HEADS, dtype=own.dtype)
            q = model.query(asked).view(HEADS, -1)
            for head in range(HEADS):
                if begin == end:
                    continue
                scores = keys[:, head] @ q[head] * (DIM // HEADS) ** -0.5
                if model.age_table is not None:
                    age = (seconds[end - 1] if now is None else now[user]) - seconds[begin:end]
                    scores = scores + model.age_table[torch.bucketize(age, time_edges(BUCKETS), right=True), head]
                chosen = torch.arange(end - begin)
                if search == "category":
                    chosen = chosen[CATEGORIES[events[begin:end]] == CATEGORIES[item]][-(top_k or 0) :]
                elif search == "lsh":
                    assert model.planes is not None
                    sides, own_side = keys[:, head] @ model.planes.to(q) > 0, q[head] @ model.planes.to(q) > 0
                    # the latest of equally near events is taken
                    ranks = (sides != own_side).sum(1) * len(chosen) - chosen
                    chosen = ranks.topk(min(top_k or 0, len(chosen)), largest=False).indices
                elif top_k is not None:
                    by = scores if search == "exact" else own @ asked
                    chosen = by.topk(min(top_k, len(by))).indices
                if len(chosen):
                    found[head] = scores[chosen].softmax(0) @ values[chosen, head]
            read = model.out(found.flatten())
            rows.append(model.network(torch.cat([asked, read, asked * read]))[0])
    return torch.stack(rows).view(3, 5)


@pytest.mark.parametrize(
    ("search", "top_k", "last", "buckets", "given"),
    [
        (None, None, None, 0, False), (None, None, 7, BUCKETS, True), ("exact", 6, None, BUCKETS, False),
        ("embedding", 6, 20, 0, False), ("category", 2, None, BUCKETS, True), ("lsh", 4, 20, BUCKETS, False),
    ],
)  # fmt: skip
def test_the_logits_follow_the_formula(
    search: str | None, top_k: int | None, last: int | None, buckets: int, given: bool
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = TargetRecommender(
        ITEMS, dim=DIM, heads=HEADS, hidden=16, categories=CATEGORIES, buckets=buckets, last=last, search=search, top_k=top_k,
    ).double()  # fmt: skip
    if model.age_table is not None:
        torch.nn.init.normal_(model.age_table)
    events, cu, candidates, seconds, shown_at = problem()
    now = shown_at if given else None
    with torch.no_grad():
        found = model(events, cu, candidates, seconds if buckets else None, now=now)
        due = plain(model, now, last or 100, top_k, search)
    torch.testing.assert_close(found, due.float())
    probabilities = model.scores(events, cu, candidates, seconds if buckets else None, now=now)
    torch.testing.assert_close(probabilities, due.float().sigmoid())
    labels = candidates % 2 == 0
    loss = model.loss(events, cu, candidates, labels, seconds if buckets else None, now=now)
    logs = torch.where(labels, probabilities, 1 - probabilities).log()
    torch.testing.assert_close(loss, -logs.mean())
    loss.backward()
    if model.age_table is not None:
        assert model.age_table.grad is not None
        assert model.age_table.grad.abs().max() > 0


def test_hashes_of_all_events_are_the_whole_history() -> None:
    """With as many events as there are, the search changes nothing; with fewer it does, and a saved model has its planes."""
    model = TargetRecommender(ITEMS, dim=DIM, heads=HEADS, search="lsh", top_k=23, bits=32)
    whole = TargetRecommender(ITEMS, dim=DIM, heads=HEADS)
    few, again = (TargetRecommender(ITEMS, dim=DIM, heads=HEADS, search="lsh", top_k=4, bits=32) for _ in range(2))
    whole.load_state_dict(model.state_dict(), strict=False)
    for other in (few, again):
        other.load_state_dict(model.state_dict())
    events, cu, candidates, *_ = problem()
    with torch.no_grad():
        torch.testing.assert_close(model(events, cu, candidates), whole(events, cu, candidates))
        assert not torch.allclose(few(events, cu, candidates), whole(events, cu, candidates), atol=1e-4)
        assert torch.equal(few(events, cu, candidates), again(events, cu, candidates))


def test_it_learns_what_lies_far_back_where_it_can_read_it() -> None:
    """Clicks that depend on events 9 to 32 back: found by the whole history, and not by the last eight events."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)

    def drawn(users: int) -> Any:
        return planted_clicks(users, 32, categories=4, groups=4, per_group=1, nearest=8, interests=2, generator=generator)

    found, test = {}, drawn(64)
    for last in (8, None):
        model = TargetRecommender(test.events.item_count, dim=16, last=last, weights="silu")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
        for _ in range(150):
            clicks = drawn(32)
            loss = model.loss(clicks.events.items, clicks.events.cu, clicks.candidates, clicks.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        far = (test.distance == 0) | (test.distance > 8)
        with torch.no_grad():
            scores = model.scores(test.events.items, test.events.cu, test.candidates)
        found[last] = auc(scores[far], test.labels[far])
    assert found[None] > 0.9
    # 0.5 by chance, within what 2,048 candidates of 64 users say
    assert abs(found[8] - 0.5) < 0.15


def test_bad_input() -> None:
    with pytest.raises(rt.InvalidInput, match="heads must divide dim"):
        TargetRecommender(10, dim=9)
    with pytest.raises(rt.InvalidInput, match="search is 'exact' and top_k is None; give both"):
        TargetRecommender(10, search="exact")
    with pytest.raises(rt.InvalidInput, match="search is None and top_k is 3; give both"):
        TargetRecommender(10, top_k=3)
    with pytest.raises(rt.InvalidInput, match="categories is None; give the category of each item"):
        TargetRecommender(10, search="category", top_k=3)
    with pytest.raises(rt.InvalidInput, match="bits is 32 and search is None; give search='lsh', or no bits"):
        TargetRecommender(10, bits=32)
    with pytest.raises(rt.InvalidInput, match=r"must be int64 \(10,\)"):
        TargetRecommender(10, categories=torch.zeros(9, dtype=torch.long))
    model = TargetRecommender(10, dim=8, buckets=4)
    events, cu, candidates, times = torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([[3, 4]]), torch.tensor([5, 6])
    with pytest.raises(rt.InvalidInput, match="times is None; the model has buckets"):
        model(events, cu, candidates)
    with pytest.raises(rt.InvalidInput, match=r"now is .*must be seconds \(1,\)"):
        model(events, cu, candidates, times, now=torch.tensor([5, 6]))
    with pytest.raises(rt.InvalidInput, match="candidates has the item 10; items are 0 to 9"):
        model(events, cu, torch.tensor([[3, 10]]), times)
    with pytest.raises(rt.InvalidInput, match="candidates has 2 users; cu has 1"):
        model(events, cu, torch.tensor([[3], [4]]), times)
    with pytest.raises(rt.InvalidInput, match="cu ends at 3"):
        model(events, torch.tensor([0, 3]), candidates, times)
    with pytest.raises(rt.InvalidInput, match=r"labels is .* like candidates"):
        model.loss(events, cu, candidates, torch.ones(2), times)
    with pytest.raises(rt.InvalidInput, match="labels has other values than 0 and 1"):
        model.loss(events, cu, candidates, torch.tensor([[0.0, torch.nan]]), times)
    with pytest.raises(rt.InvalidInput, match="there is no candidate to learn from"):
        model.loss(events, cu, candidates[:, :0], torch.ones(1, 0), times)
    with pytest.raises(rt.InvalidInput, match="times has NaN"):
        model(events, cu, candidates, times * torch.nan)
    with pytest.raises(rt.InvalidInput, match=r"times is .*; must be seconds"):
        model(events, cu, candidates, times > 5)
    for words, due in (
        ({"weights": "relu"}, "weights is"),
        ({"backend": "cuda"}, "backend is"),
        ({"buckets": "a"}, "buckets is"),
    ):
        with pytest.raises(rt.InvalidInput, match=due):
            TargetRecommender(10, dim=8, **words)
    with pytest.raises(rt.InvalidInput, match="categories is"):
        TargetRecommender(2, dim=8, categories=torch.tensor([True, False]))
    without = TargetRecommender(10, dim=8)
    with pytest.raises(rt.InvalidInput, match="times came, and the model has no buckets"):
        without(events, cu, candidates, times)
