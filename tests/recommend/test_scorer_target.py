"""`Scorer` with recommenders of target attention: scores over pages against the model that reads each history anew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.recommend import Scorer, TargetRecommender
from rooftile.recommend.serving import target_reader, users
from rooftile.recommend.serving.target_reader import TargetReader

ITEMS, BUCKETS = 60, 9
CATEGORIES = torch.arange(ITEMS) // 7
KINDS: dict[str, dict[str, Any]] = {
    "DIN": {"weights": "silu"},
    "DIN, last": {"last": 9},
    "SIM, soft": {"search": "embedding", "top_k": 5, "categories": CATEGORIES},
    "SIM, hard": {"search": "category", "top_k": 3, "categories": CATEGORIES, "buckets": BUCKETS},
    "ETA": {"search": "lsh", "top_k": 4, "bits": 40},
    "TWIN": {"search": "exact", "top_k": 6, "buckets": BUCKETS},
    "TWIN, last": {"search": "exact", "top_k": 6, "buckets": BUCKETS, "last": 14},
}
USER = 10**9  # seconds of the first events


def made(kind: str, dtype: torch.dtype = torch.float64, **words: Any) -> TargetRecommender:
    """A model with large weights, whose scores and choices differ from event to event."""
    torch.manual_seed(0)
    model = TargetRecommender(ITEMS, **{"dim": 12, "heads": 2, "hidden": 16} | KINDS[kind] | words)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        if model.age_table is not None:
            model.age_table.normal_()
    return model.to(dtype)


def history(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Events of a user, and their times."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(ITEMS, (length,), generator=g), USER + torch.randint(3000, (length,), generator=g).cumsum(0)


def anew(model: TargetRecommender, events: Tensor, times: Tensor, candidates: Any, at: int | None = None) -> Tensor:
    """The model's scores (n,) over a history that is read as a whole."""
    now = None if at is None else torch.tensor([at])
    items = torch.as_tensor(candidates)
    with torch.no_grad():
        return model.scores(events, torch.tensor([0, len(events)]), items[None], times if model.timed else None, now=now)[0]


def append(scorer: Scorer, user: Any, events: Any, times: Any) -> int:
    return scorer.append(user, events, times if scorer.model.timed else None)


def close(found: Tensor, due: Tensor, most: float = 1e-5) -> bool:
    """Whether probabilities agree."""
    return found.shape == due.shape and torch.allclose(found, due, rtol=0, atol=most)


ANN = history(43, 1)
CANDIDATES = torch.tensor([3, 3, 59, 0, 17, 31])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(), (1,), (5, 6, 26), tuple(range(1, 43))], ids=len)
def test_histories_in_any_cuts_give_the_scores_of_the_whole(kind: str, cuts: tuple[int, ...]) -> None:
    model = made(kind, torch.float32)
    scorer = Scorer(model, room=100, block_size=4)
    # blocks of other users lie in between
    append(scorer, "bob", *history(7, 2))
    for n, (part, when) in enumerate(zip(ANN[0].tensor_split(cuts), ANN[1].tensor_split(cuts), strict=True)):
        append(scorer, "ann", part, when)
        if n % 9 == 1:
            append(scorer, "bob", [n], [2 * USER + n])
    due = anew(model, *ANN, CANDIDATES)
    assert due.std() > 0.05
    assert close(scorer.score("ann", CANDIDATES), due)
    assert close(scorer.score("ann"), anew(model, *ANN, torch.arange(ITEMS)))
    if model.timed:
        at = int(ANN[1][-1]) + 5000
        assert close(scorer.score("ann", CANDIDATES, at), anew(model, *ANN, CANDIDATES, at))
        assert not close(anew(model, *ANN, CANDIDATES, at), due, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_users_of_a_batch_do_not_depend_on_each_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a few events at a time, and copies of all users at once or of a few
    monkeypatch.setattr(users, "ROWS", 16)
    check_users_of_a_batch(kind)
    monkeypatch.setattr(target_reader, "MOST_COPIED", 44 * 24)
    check_users_of_a_batch(kind)


def check_users_of_a_batch(kind: str, dtype: torch.dtype = torch.float64) -> None:
    model = made(kind, dtype)
    given = {"ann": ANN, "bob": history(1, 2), 7: history(31, 3), "new": history(0, 4)}
    asked = [("bob", [5]), (7, torch.arange(9)), ("ann", CANDIDATES), ("new", [4, 8]), ("bob", torch.arange(0)), ("bob", [5, 9])]
    at = [None if n % 2 else 3 * USER + n for n in range(len(asked))] if model.timed else None
    due = [anew(model, *given[user], items, None if at is None else at[n]) for n, (user, items) in enumerate(asked)]
    scorer = Scorer(model, room=100, block_size=4)
    for half in (slice(0, 20), slice(20, None)):
        batch = [(user, events[half], times[half]) for user, (events, times) in given.items()]
        scorer.append_many(batch if model.timed else [x[:2] for x in batch])
    found = scorer.score_many(asked, at=at)
    assert all(close(x, y, 1e-6 if dtype == torch.float64 else 1e-5) for x, y in zip(found, due, strict=True))


FORMATS = {"float32": 1e-5, "bfloat16": 1.2e-2, "float16": 1e-3, "fp8": 6e-2, "int8": 6e-3}


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_formats_of_pages(kv_dtype: str) -> None:
    """Rounding moves scores by less than one wrong page does."""
    model = made("DIN, last", torch.float32, last=30)
    scorer = Scorer(model, room=100, block_size=8, kv_dtype=kv_dtype)
    append(scorer, "ann", *ANN)
    items = torch.arange(ITEMS)
    due = anew(model, *ANN, items)
    found = scorer.score("ann")
    worst = (found - due).abs().max()
    assert worst <= FORMATS[kv_dtype]
    assert kv_dtype == "float32" or worst > 0
    wrong = ANN[0].clone()
    wrong[-8:] = history(8, 9)[0]
    assert (anew(model, wrong, ANN[1], items) - due).abs().max() > 5 * FORMATS[kv_dtype]


@pytest.mark.parametrize("kind", ["DIN", "TWIN", "SIM, soft", "SIM, hard", "ETA"])
def test_only_the_last_events_are_kept(kind: str) -> None:
    """Old blocks are given back, also where the new events need the room of the old ones."""
    model, (events, times) = made(kind), history(300, 5)
    for room in (200, 28):
        scorer = Scorer(model, room=room, block_size=4, keep=25)
        scorer._reader.pages.storage.fill_(torch.nan)
        stop = 0
        for count in (20, 5, 1, 2, 60, 3, 25, 30, 1, 4, 0, 149):
            first, stop = stop, stop + count
            assert append(scorer, "ann", events[first:stop], times[first:stop]) == min(stop, 25)
            assert scorer.histories.pool.used_blocks <= 7
            last = slice(max(stop - 25, 0), stop)
            assert close(scorer.score("ann", CANDIDATES), anew(model, events[last], times[last], CANDIDATES), 1e-6)
        scorer.histories.check()
        assert scorer.histories.evicted == 0


def test_a_call_that_does_not_fit_forgets_no_old_events() -> None:
    model, (events, times) = made("TWIN"), history(40, 5)
    scorer = Scorer(model, room=28, block_size=4, keep=25)
    append(scorer, "ann", events[:25], times[:25])
    before = scorer.score("ann")
    with pytest.raises(InvalidInput, match="2 users of one call need 9 blocks; the pool has 7 of 4 events"):
        scorer.append_many([("ann", events[25:29], times[25:29]), ("bob", events[:8], times[:8])])
    assert torch.equal(scorer.score("ann"), before)
    assert append(scorer, "ann", events[25:], times[25:]) == 25
    scorer.histories.check()


def test_what_the_model_does_not_read_is_not_kept() -> None:
    model, (events, times) = made("TWIN, last"), history(300, 5)
    scorer = Scorer(model, room=400, block_size=4)
    for part, when in zip(events.split(7), times.split(7), strict=True):
        append(scorer, "ann", part, when)
    # 14 events lie in five blocks at most
    assert scorer.histories.pool.used_blocks <= 5
    assert close(scorer.score("ann", CANDIDATES), anew(model, events, times, CANDIDATES), 1e-6)
    fewer = Scorer(model, room=400, block_size=4, keep=6)
    assert append(fewer, "ann", events, times) == 6
    assert close(fewer.score("ann", CANDIDATES), anew(model, events[-6:], times[-6:], CANDIDATES), 1e-6)


@pytest.mark.parametrize("kind", ["SIM, hard", "ETA"])
def test_who_waits_longest_makes_room_and_may_come_back(kind: str) -> None:
    model = made(kind)
    scorer = Scorer(model, room=24, block_size=4)
    given = {user: history(7, n) for n, user in enumerate("abc")}
    for user, (events, times) in given.items():
        append(scorer, user, events, times)
    before = scorer.score("b")
    append(scorer, "d", [9], [USER])
    assert (list(scorer), scorer.histories.evicted, "a" in scorer) == (["c", "b", "d"], 1, False)
    with pytest.raises(InvalidInput, match="user 'a' is unknown: never appended, forgotten, or evicted"):
        scorer.score("a", [1])
    append(scorer, "e", *history(16, 6))
    assert list(scorer) == ["d", "e"]
    append(scorer, "b", *given["b"])
    assert close(scorer.score("b"), before, 1e-6)
    assert close(before, anew(model, *given["b"], torch.arange(ITEMS)), 1e-6)
    with pytest.raises(InvalidInput, match="would have 25 events in 7 blocks; the pool has 6 of 4 events: give the last events"):
        append(scorer, "b", [0] * 18, [2 * USER] * 18)
    with pytest.raises(InvalidInput, match="2 users of one call need 8 blocks"):
        scorer.append_many([(user, *(history(13, 1) if model.timed else history(13, 1)[:1])) for user in "xy"])
    assert close(scorer.score("b"), before, 1e-6)
    assert scorer.forget("b")
    assert not scorer.forget("b")
    scorer.clear()
    assert (len(scorer), scorer.histories.pool.used_blocks) == (0, 0)
    scorer.histories.check()


@pytest.mark.parametrize("keep", [None, 12])
def test_an_error_between_passes_leaves_all_users_as_they_were(keep: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "ROWS", 4)
    model, (events, times) = made("TWIN"), ANN
    scorer = Scorer(model, room=100, block_size=4, keep=keep)
    append(scorer, "ann", events[:13], times[:13])
    before, read, passes = scorer.score("ann"), TargetReader.read, []

    def fails(self: TargetReader, *arguments: Any) -> None:
        passes.append(arguments)
        if len(passes) == 3:
            raise MemoryError("no memory")
        read(self, *arguments)

    monkeypatch.setattr(TargetReader, "read", fails)
    with pytest.raises(MemoryError):
        scorer.append_many([("ann", events[13:20], times[13:20]), (7, *history(9, 3))])
    assert list(scorer) == ["ann"]
    assert torch.equal(scorer.score("ann"), before)
    append(scorer, "ann", events[13:], times[13:])
    last = slice(None if keep is None else -keep, None)
    assert close(scorer.score("ann", CANDIDATES), anew(model, events[last], times[last], CANDIDATES), 1e-6)
    scorer.histories.check()


def test_calls_from_threads() -> None:
    """Threads have a user each, and one together, whose events may come in any order."""
    model, given = made("DIN"), {n: history(20, n)[0] for n in range(6)}
    scorer, failed, together = Scorer(model, room=600, block_size=4), [], threading.Barrier(len(given))
    due = {n: anew(model, events, events, torch.arange(ITEMS)) for n, events in given.items()}

    def serve(user: int) -> None:
        together.wait()
        try:
            for part in given[user].split(3):
                scorer.append(user, part)
                scorer.append("all", part)
                scorer.score("all", [1])
            assert close(scorer.score(user), due[user], 1e-6)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(user,)) for user in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    everything = torch.cat(list(given.values()))
    assert close(scorer.score("all"), anew(model, everything, everything, torch.arange(ITEMS)), 1e-6)
    scorer.histories.check()


def test_numbers_of_other_libraries_and_other_modes() -> None:
    model, (events, times) = made("TWIN", torch.float32), history(9, 1)
    with torch.inference_mode():
        scorer = Scorer(model, room=np.int64(64), block_size=np.int32(4), keep=np.int64(30))
        scorer.append("ann", events[:4].numpy(), times[:4].tolist())
    scorer.append("ann", events[4:].int(), times[4:].numpy())
    at = int(times[-1]) + 60
    due = anew(model, events, times, [4, 5], at)
    for items in (np.array([4, 5]), [np.int32(4), 5], torch.tensor([4, 5], dtype=torch.int16)):
        assert close(scorer.score("ann", items, np.int64(at)), due)
    for moments in (np.array([at, at]), torch.tensor([at, at]), [at, np.int64(at)], at):
        assert all(close(x, due) for x in scorer.score_many([("ann", [4, 5])] * 2, at=moments))
    with torch.inference_mode():
        assert close(scorer.score("ann", [4, 5], at), due)
    with torch.autocast("cpu", torch.bfloat16):
        scorer.append("bob", events, times)
        assert close(scorer.score("bob", [4, 5], at), anew(model, events, times, [4, 5], at), 1e-3)


REFUSED: dict[str, tuple[str, Callable[[Scorer], Any]]] = {
    "times begins at 5, before the last known event's 20": ("TWIN", lambda s: s.append("ann", [1], [5])),
    "times falls at event 1, from 30 to 29; must rise": ("TWIN", lambda s: s.append("ann", [1, 2], [30, 29])),
    "2 events and 1 times; give one per event": ("TWIN", lambda s: s.append("ann", [1, 2], [30])),
    "events without times; the model has buckets": ("TWIN", lambda s: s.append("ann", [1])),
    "user 'ann' has times, and the model has no buckets of time; give it buckets, or no times": (
        "DIN", lambda s: s.append("ann", [1], [30]),
    ),
    "at is 40, and the model has no buckets of time; give it buckets, or leave at out": (
        "DIN", lambda s: s.score("ann", [1], at=40),
    ),
    "at is 3 for user 'ann', whose last event is at 20": ("TWIN", lambda s: s.score("ann", [1], 3)),
    "at has 1 times for 2 users": ("TWIN", lambda s: s.score_many([("ann", [1]), ("ann", [2])], at=[40])),
    "at is 40.5; must be whole seconds": ("TWIN", lambda s: s.score("ann", [1], 40.5)),
    "at is 9223372036854775808; must be whole seconds of int64": ("TWIN", lambda s: s.score("ann", [1], 1 << 63)),
    r"events is \[36893488147419103232\]; must be whole numbers of int64": ("DIN", lambda s: s.append("ann", [1 << 65])),
    "has the item 60; items are 0 to 59": ("SIM, hard", lambda s: s.append("ann", [60], [30])),
    "has the item -1": ("SIM, soft", lambda s: s.score("ann", [3, -1])),
    "must be whole numbers": ("ETA", lambda s: s.append("ann", [1.5])),
    "user 'eve' is unknown": ("DIN", lambda s: s.score("eve", [1])),
    "comes twice in one call": ("DIN", lambda s: s.append_many([("bob", [1]), ("bob", [2])])),
    "has no states: its candidates read events alone; call score": ("DIN", lambda s: s.state("ann")),
    "has no states: its candidates": ("DIN", lambda s: s.candidate_states("ann", [1])),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_changes_nothing(words: str) -> None:
    kind, call = REFUSED[words]
    scorer = Scorer(made(kind), room=64, block_size=4)
    append(scorer, "ann", [1, 2], [10, 20])
    before = scorer.score("ann")
    with pytest.raises((InvalidInput, Unsupported), match=words):
        call(scorer)
    assert (len(scorer), scorer.histories.length("ann")) == (1, 2)
    assert torch.equal(scorer.score("ann"), before)


def test_arguments_that_such_models_do_not_take() -> None:
    with pytest.raises(InvalidInput, match="head came, and a TargetRecommender scores candidates by its own network"):
        Scorer(made("DIN"), room=64, head=lambda states: states.sum(-1))
    with pytest.raises(InvalidInput, match="keep is 10; the model reads the last 9 events: give no more"):
        Scorer(made("DIN, last"), room=64, keep=10)
    with pytest.raises(InvalidInput, match="keep is 0; must be an int of at least 1"):
        Scorer(made("DIN"), room=64, keep=0)


@pytest.mark.parametrize("name", ["embedding.weight", "categories", "planes"])
def test_a_model_that_has_changed(name: str) -> None:
    """Categories and planes of hashes count as weights: they are in the pages too."""
    model = made("ETA" if name == "planes" else "SIM, hard")
    scorer = Scorer(model, room=64)
    append(scorer, "ann", [1, 2], [10, 20])
    with torch.no_grad():
        model.state_dict()[name].copy_(model.state_dict()[name].flip(0))
    with pytest.raises(InvalidInput, match="weights have changed since users were read; call clear"):
        scorer.score("ann", [1])
    scorer.clear()
    append(scorer, "ann", [1, 2], [10, 20])
    assert close(scorer.score("ann", [1]), anew(model, torch.tensor([1, 2]), torch.tensor([10, 20]), [1]), 1e-6)
    model.train()
    with pytest.raises(InvalidInput, match="training mode"):
        scorer.score("ann", [1])


@pytest.mark.parametrize(
    ("kind", "beside", "words"),
    [
        ("DIN", 0, ""), ("TWIN", 8, " + 8 of times"), ("SIM, soft", 8, " + 8 of items"), ("ETA", 16, " + 16 of hashes"),
        ("SIM, hard", 16, " + 8 of times + 8 of categories"),
    ],
)  # fmt: skip
def test_bytes_of_a_user(kind: str, beside: int, words: str) -> None:
    scorer = Scorer(made(kind, torch.float32), room=64, block_size=4)
    append(scorer, "ann", [1, 2, 3, 4, 5], [1] * 5)
    # a key and a value of 12 numbers of 4 bytes
    assert scorer.histories.block_bytes == 4 * (2 * 12 * 4 + beside)
    assert f"an event takes 1 layer x 2 x 2 heads x 6 dims x 4 bytes{words} = {96 + beside} bytes" in str(scorer)
