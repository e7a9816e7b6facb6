"""`Scorer`: scores over users' histories in pages against the model that reads each history anew."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.errors import InvalidInput, Unsupported
from rooftile.recommend import HSTURecommender, Scorer
from rooftile.recommend.serving import users
from rooftile.recommend.serving.hstu_reader import HSTUReader

ITEMS, LONGEST = 60, 40


def made(seed: int = 0, dtype: torch.dtype = torch.float64, **words: Any) -> HSTURecommender:
    """A model whose tables are not zero."""
    torch.manual_seed(seed)
    words = {"dim": 16, "heads": 2, "layers": 2, "longest": LONGEST, "buckets": 9} | words
    model = HSTURecommender(ITEMS, **words).eval()
    with torch.no_grad():
        for layer in model.layers:
            for table in (layer.position_table, layer.time_table):
                if table is not None:
                    table.normal_(std=0.5)
    return model.to(dtype)


def history(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Events of a user, and their times."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(ITEMS, (length,), generator=g), torch.randint(10**9, 10**9 + 5000, (length,), generator=g).sort().values


def states_anew(model: HSTURecommender, events: Tensor, times: Tensor, candidates: Tensor | None = None, at: int = 0) -> Tensor:
    """States of a history that is read as a whole, or those of candidates behind it."""
    count = 0
    if candidates is not None:
        count = len(candidates)
        events, times = torch.cat([events, candidates]), torch.cat([times, torch.full((count,), at)])
    with torch.no_grad():
        states = model(events, torch.tensor([0, len(events)]), times if model.timed else None, targets=count or None)
    return states[-count:] if count else states


USERS = {"ann": history(23, 1), "bob": history(1, 2), 7: history(40, 3)}


@pytest.mark.parametrize("way", ["tiled", "eager"])
@pytest.mark.parametrize("cuts", [(), (1,), (5, 6, 16), tuple(range(1, 23))])
def test_histories_in_any_parts_give_the_scores_of_the_whole(cuts: tuple[int, ...], way: str) -> None:
    model = made(backend=way)
    scorer = Scorer(model, room=100, block_size=4)
    events, times = USERS["ann"]
    for part, when in zip(events.tensor_split(cuts), times.tensor_split(cuts), strict=True):
        scorer.append("ann", part, when)
    state = states_anew(model, events, times)[-1]
    items = torch.tensor([3, 3, 59, 0])
    torch.testing.assert_close(scorer.state("ann"), state)
    torch.testing.assert_close(scorer.score("ann", items), model.scores(state, items))
    torch.testing.assert_close(scorer.score("ann"), model.scores(state))
    at = int(times[-1]) + 100
    due = states_anew(model, events, times, items, at)
    torch.testing.assert_close(scorer.candidate_states("ann", items, at), due)


def test_users_of_a_batch_do_not_depend_on_each_other() -> None:
    model = made()
    scorer, items = Scorer(model, room=100, block_size=4), torch.tensor([5, 9])
    assert scorer.append_many([(user, events[:n], times[:n]) for n, (user, (events, times)) in enumerate(USERS.items())]) == [
        0,
        1,
        2,
    ]
    scorer.append_many([(user, events[n:], times[n:]) for n, (user, (events, times)) in enumerate(USERS.items())])
    asked = [("bob", items), (7, torch.arange(9)), ("ann", torch.empty(0, dtype=torch.long)), ("bob", [5])]
    found = scorer.score_many(asked)
    for (user, wanted), scores in zip(asked, found, strict=True):
        events, times = USERS[user]
        torch.testing.assert_close(scores, model.scores(states_anew(model, events, times)[-1], torch.as_tensor(wanted)))
    assert torch.equal(found[0][:1], found[3])


def test_candidates_are_alone() -> None:
    """A candidate's state is the same beside others, and nothing of it stays."""
    model = made()
    scorer = Scorer(model, room=100, block_size=4, head=lambda states: states.sum(-1))
    scorer.append("ann", *USERS["ann"])
    items = torch.arange(12)
    together = scorer.score("ann", items)
    torch.testing.assert_close(together, torch.stack([scorer.score("ann", [int(n)])[0] for n in items]))
    at = int(USERS["ann"][1][-1])
    torch.testing.assert_close(together, states_anew(model, *USERS["ann"], items, at).sum(-1))
    assert len(scorer.score("ann", [])) == 0


@pytest.mark.parametrize(
    ("kv_dtype", "error"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 4e-3), ("fp8", 0.1), ("int8", 4e-2)]
)
def test_formats_of_pages(kv_dtype: str, error: float) -> None:
    model = made(dtype=torch.float32)
    scorer = Scorer(model, room=100, kv_dtype=kv_dtype)
    events, times = USERS["ann"]
    scorer.append("ann", events, times)
    due = states_anew(model, events, times)[-1]
    worst = (scorer.state("ann") - due).norm() / due.norm()
    assert worst <= error
    assert kv_dtype == "float32" or worst > 0
    bits = {"float32": 4, "fp8": 1, "int8": 1}.get(kv_dtype, 2)
    head = "(8 bytes + 4 of scale)" if bits == 1 else f"8 dims x {bits} bytes"
    assert f"{head} + 8 of items + 8 of times + 4 of states" in str(scorer)


def test_who_waits_longest_makes_room_and_may_come_back() -> None:
    model = made(buckets=0)
    scorer = Scorer(model, room=24, block_size=4)
    for user in "abc":
        scorer.append(user, [1, 2, 3, 4, 5, 6, 7])
    before = scorer.score("b")
    scorer.append("d", [9])
    assert (list(scorer), scorer.histories.evicted, "a" in scorer) == (["c", "b", "d"], 1, False)
    with pytest.raises(InvalidInput, match="user 'a' is unknown: never appended, forgotten, or evicted"):
        scorer.score("a", [1])
    scorer.append("e", list(range(16)))
    assert list(scorer) == ["d", "e"]
    scorer.append("b", [1, 2, 3, 4, 5, 6, 7])
    assert torch.equal(scorer.score("b"), before)
    with pytest.raises(InvalidInput, match="would have 25 events in 7 blocks; the pool has 6 of 4 events"):
        scorer.append("b", [0] * 18)
    assert torch.equal(scorer.score("b"), before)
    scorer.histories.check()
    assert scorer.forget("b")
    assert not scorer.forget("b")
    scorer.clear()
    assert (len(scorer), scorer.histories.pool.used_blocks) == (0, 0)


def kept_of(model: HSTURecommender, events: Tensor, times: Tensor) -> Scorer:
    """A scorer that has read one history."""
    scorer = Scorer(model, room=100)
    scorer.append("ann", events, times)
    return scorer


def test_a_history_longer_than_the_model_s() -> None:
    model = made()
    events, times = history(60, 4)
    scorer = Scorer(model, room=100)
    scorer.append("ann", events[:38], times[:38])
    with pytest.raises(InvalidInput, match="has 38 events and gets 3; the model's longest is 40"):
        scorer.append("ann", events[38:41], times[38:41])
    assert scorer.append("ann", events[38:40], times[38:40]) == 40
    with pytest.raises(InvalidInput, match="40 events, the model's longest; a candidate would stand behind them"):
        scorer.candidate_states("ann", [1])
    kept = Scorer(model, room=100, keep=25)
    kept.append("ann", events[:38], times[:38])
    assert kept.append("ann", events[38:41], times[38:41]) == 25
    torch.testing.assert_close(kept.state("ann"), states_anew(model, events[16:41], times[16:41])[-1])
    # a user may come with more than there is a place for
    assert kept.append_many([("bob", events, times), ("eve", events[:3], times[:3])]) == [25, 3]
    assert torch.equal(kept.state("bob"), kept_of(model, events[-25:], times[-25:]).state("ann"))
    # a history that is cut always leaves a place for candidates
    assert kept.append("ann", events[41:55], times[41:55]) == 39
    assert len(kept.candidate_states("ann", [1])) == 1
    assert kept.append("ann", events[55:], times[55:]) == 25
    torch.testing.assert_close(kept.state("ann"), states_anew(model, events[35:], times[35:])[-1])


def test_an_error_between_passes_leaves_all_users_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass ends in a block that also has its user's last event before the call; the second finds no memory."""
    monkeypatch.setattr(users, "ROWS", 4)
    model = made()
    scorer = Scorer(model, room=100, block_size=4)
    events, times = USERS["ann"]
    scorer.append("ann", events[:5], times[:5])
    passes = []

    def fails(self: HSTUReader, *arguments: Any) -> Tensor:
        passes.append(len(arguments[0]))
        if len(passes) == 3:
            raise MemoryError("no memory")
        return read(self, *arguments)

    read = HSTUReader.read
    monkeypatch.setattr(HSTUReader, "read", fails)
    with pytest.raises(MemoryError):
        scorer.append_many([("ann", events[5:7], times[5:7]), (7, *USERS[7])])
    assert passes == [4, 4, 4]
    assert (list(scorer), scorer.histories.length("ann")) == (["ann"], 5)
    torch.testing.assert_close(scorer.state("ann"), states_anew(model, events[:5], times[:5])[-1])
    scorer.append("ann", events[5:], times[5:])
    torch.testing.assert_close(scorer.state("ann"), states_anew(model, events, times)[-1])
    scorer.histories.check()


def test_calls_from_threads() -> None:
    model = made(buckets=0)
    scorer, failed = Scorer(model, room=600), []
    due = {n: model.scores(states_anew(model, *history(20, n))[-1]) for n in range(6)}

    def serve(user: int) -> None:
        events, _ = history(20, user)
        for _ in range(3):
            scorer.forget(user)
            for part in events.split(7):
                scorer.append(user, part)
            if not torch.allclose(scorer.score(user), due[user]):
                failed.append(user)

    threads = [threading.Thread(target=serve, args=(user,)) for user in due]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    scorer.histories.check()


def test_numbers_of_other_libraries() -> None:
    model = made()
    scorer = Scorer(model, room=np.int64(64), block_size=np.int32(4))
    assert scorer.append("ann", np.array([1, 2]), np.array([10, 20])) == 2
    assert scorer.append("ann", torch.tensor([3], dtype=torch.int32), [np.int64(20)]) == 3
    assert scorer.score("ann", np.array([4, 5])).shape == (2,)
    with torch.inference_mode():
        assert scorer.append("bob", [1], [1]) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert scorer.score("bob", [1]).shape == (1,)


REFUSED = {
    "times begins at 5, before the last known event's 20": lambda s: s.append("ann", [1], [5]),
    "times falls at event 1, from 30 to 29; must rise": lambda s: s.append("ann", [1, 2], [30, 29]),
    "2 events and 1 times; give one per event": lambda s: s.append("ann", [1, 2], [30]),
    "events without times; the model has buckets": lambda s: s.append("ann", [1]),
    "has the item 60; items are 0 to 59": lambda s: s.append("ann", [60], [30]),
    "has the item -1": lambda s: s.score("ann", [-1]),
    "events is 1.5": lambda s: s.append("ann", 1.5, [30]),
    "must be whole numbers": lambda s: s.append("ann", [1.5], [30]),
    "user is .*; must be hashable": lambda s: s.append([1], [1], [30]),
    "must be a value that equals itself": lambda s: s.append(torch.tensor(1), [1], [30]),
    "user is nan; must be a value that equals itself": lambda s: s.append(float("nan"), [1], [30]),
    "user is .*NaT.*; must be a value that equals itself": lambda s: s.score(np.datetime64("NaT"), [1]),
    "comes twice in one call": lambda s: s.append_many([("bob", [1], [1]), ("bob", [2], [2])]),
    "the batch has 'ann'": lambda s: s.score_many(["ann"]),
    "user 'eve' is unknown": lambda s: s.score("eve", [1]),
    "without a head scores are of the last event's state: leave at out": lambda s: s.score("ann", [1], at=40),
    "at is 3 for user 'ann', whose last event is at 20": lambda s: s.candidate_states("ann", [1], 3),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_changes_nothing(words: str) -> None:
    scorer = Scorer(made(), room=64, block_size=4)
    scorer.append("ann", [1, 2], [10, 20])
    before = scorer.score("ann")
    with pytest.raises(InvalidInput, match=words):
        REFUSED[words](scorer)
    assert (len(scorer), scorer.histories.length("ann")) == (1, 2)
    assert torch.equal(scorer.score("ann"), before)


@pytest.mark.parametrize("change", [lambda m: m.float(), lambda m: setattr(m, "place", torch.nn.Embedding(9, 16))])
def test_pages_do_not_serve_a_model_of_another_form(change: Any) -> None:
    scorer = Scorer(made(), room=64)
    change(scorer.model)
    scorer.clear()
    with pytest.raises(InvalidInput, match="other shapes, dtypes or devices than its pages were made for; make another Scorer"):
        scorer.append("ann", [1, 2], [10, 20])


def test_models_that_cannot_be_served() -> None:
    model = made()
    with pytest.raises(InvalidInput, match=r"must be a rooftile\.recommend\.HSTURecommender or rooftile"):
        Scorer(torch.nn.Linear(2, 2), room=10)
    with pytest.raises(InvalidInput, match="kv_dtype is 'int4'; must be 'auto', 'bfloat16'"):
        Scorer(model, room=10, kv_dtype="int4")
    with pytest.raises(InvalidInput, match="room is 0"):
        Scorer(model, room=0)
    with pytest.raises(InvalidInput, match="keep is 40; must be below the model's longest"):
        Scorer(model, room=10, keep=40)
    model.layers[0].mask = rt.CAUSAL & rt.Targets(4)
    with pytest.raises(Unsupported, match="a row that is a target now would be an event later: leave Targets out"):
        Scorer(model, room=10)
    model = made()
    model.layers[0].scale = None
    with pytest.raises(Unsupported, match="divides by the number of events"):
        Scorer(model, room=10)
    model = made()
    scorer = Scorer(model, room=64)
    scorer.append("ann", [1, 2], [10, 20])
    with torch.no_grad():
        model.embedding.weight.add_(1)
    with pytest.raises(InvalidInput, match="weights have changed since users were read; call clear"):
        scorer.score("ann", [1])
    scorer.clear()
    scorer.append("ann", [1, 2], [10, 20])
    torch.testing.assert_close(scorer.state("ann"), states_anew(model, torch.tensor([1, 2]), torch.tensor([10, 20]))[-1])
    model.train()
    with pytest.raises(InvalidInput, match="training mode"):
        scorer.score("ann", [1])


def test_times_that_a_model_does_not_read() -> None:
    scorer = Scorer(made(buckets=0), room=64, head=lambda states: states.sum(-1))
    with pytest.raises(InvalidInput, match="user 'ann' has times, and the model has no buckets of time; give it buckets, or no"):
        scorer.append("ann", [1, 2], [10, 20])
    scorer.append("ann", [1, 2])
    for call in (scorer.score, scorer.candidate_states):
        with pytest.raises(
            InvalidInput, match="at is 40, and the model has no buckets of time; give it buckets, or leave at out"
        ):
            call("ann", [1], at=40)


def test_a_head_that_returns_another_shape() -> None:
    scorer = Scorer(made(), room=64, head=lambda states: states)
    scorer.append("ann", [1, 2], [10, 20])
    with pytest.raises(InvalidInput, match=r"head has returned .*; must be a score per candidate, \(2,\)"):
        scorer.score("ann", [1, 2])


def test_bytes_of_a_user() -> None:
    scorer = Scorer(made(dtype=torch.float32), room=64, block_size=4)
    scorer.append("ann", [1, 2, 3, 4, 5], [1] * 5)
    # 2 layers x (key and value) x 16 numbers of 4 bytes, item and time, and a state of 16 numbers per block
    each = 4 * (2 * 2 * 16 * 4 + 16) + 16 * 4
    assert scorer.histories.block_bytes == each
    assert scorer.memory("ann") == f"5 events in 8 slots = {2 * each / 1000:.3g} kB, 38% of it empty"
