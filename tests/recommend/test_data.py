"""Users' events from files of MovieLens's and Amazon's forms, the split, and histories with planted interests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rooftile as rt
from rooftile.recommend.data import Events, packed, planted_events, read_events, without_last

# user, item, rating, seconds; not in order
RATINGS = [(7, 50, 5, 30), (3, 40, 4, 10), (7, 60, 1, 20), (3, 50, 3, 10), (7, 40, 4, 20)]
DUE = Events(torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 2, 5]), torch.tensor([10, 10, 20, 20, 30]), 3)


def written(folder: Path, name: str) -> Path:
    file = folder / name
    lines = {
        "ratings.dat": ["::".join(map(str, row)) for row in RATINGS],
        "u.data": ["\t".join(map(str, row)) for row in RATINGS],
        "ratings.csv": ["userId,movieId,rating,timestamp", *(",".join(map(str, row)) for row in RATINGS)],
        "headless.csv": [f"{item},{user},{rating},{time}" for user, item, rating, time in RATINGS],
        "reviews.jsonl": [
            json.dumps({"reviewerID": f"A{user}", "asin": f"B{item}", "overall": rating, "unixReviewTime": time, "text": "{,}"})
            for user, item, rating, time in RATINGS
        ],
        "reviews2023.jsonl.gz": [
            json.dumps({"user_id": f"A{user}", "parent_asin": f"B{item}", "rating": rating, "timestamp": (10**9 + time) * 1000})
            for user, item, rating, time in RATINGS
        ],
    }[name]
    text = "\n".join(lines) + "\n"
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)
    return file


@pytest.mark.parametrize(
    "name", ["ratings.dat", "u.data", "ratings.csv", "headless.csv", "reviews.jsonl", "reviews2023.jsonl.gz"]
)
def test_files_of_all_forms(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, name)
    columns = ("item", "user", "rating", "timestamp") if name == "headless.csv" else None
    found = read_events(tmp_path if name in ("ratings.dat", "u.data", "ratings.csv") else file, columns=columns)
    # users and items are numbered as they come
    by_user = [[(int(t) % 10**9, int(i)) for t, i in zip(one.times, one.items, strict=True)] for one in map(found.of, range(2))]
    assert sorted(map(len, by_user)) == [2, 3]
    assert found.item_count == 3
    long = max(by_user, key=len)
    # user 7 saw 60, 40 and then 50; 50 came first in the file, then 40, then 60
    assert long == [(20, 2), (20, 1), (30, 0)]
    assert len(read_events(file, columns=columns, least_rating=4).items) == 3


def test_users_and_items_are_numbered_and_sorted() -> None:
    users, items, _, times = (torch.tensor(column) for column in zip(*RATINGS, strict=True))
    found = packed(users, items, times)
    assert all(torch.equal(x, y) for x, y in zip(found[:3], DUE[:3], strict=True))
    assert found.item_count == 3


def test_the_last_event_of_each_user_is_held_out() -> None:
    events = Events(torch.tensor([4, 2, 3, 1]), torch.tensor([0, 1, 1, 4]), torch.arange(4), 5)
    before, users, due = without_last(events)
    assert before.items.tolist() == [4, 2, 3]
    assert before.cu.tolist() == [0, 1, 1, 3]
    assert (users.tolist(), due.tolist()) == ([2], [1])
    last = events.last(2)
    assert (last.items.tolist(), last.cu.tolist()) == ([4, 3, 1], [0, 1, 1, 3])


BAD = {
    "no file": ("nothing", None, None, "is not there"),
    "an empty folder": (".", None, None, "is a folder without ratings.dat, ratings.csv, u.data"),
    "no head": ("x.csv", "1,2,3,4\n", None, "which is no head; name the columns"),
    "fields": ("x.csv", "1,2,3\n", ("user", "item", "rating", "timestamp"), "event 1 has 3 fields"),
    "a time": ("x.csv", "user,item,timestamp\n1,2,3\n1,2,soon\n", None, "event 2 cannot be read: could not convert"),
    "columns of JSON": ("x.jsonl", '{"user": 1, "item": 2}\n', ("user", "item"), "has lines of JSON, .*; leave columns out"),
    "no time": ("x.jsonl", '{"user": 1, "item": 2}\n', None, "event 1 cannot be read: it has no user, item or timestamp"),
}


@pytest.mark.parametrize("what", BAD)
def test_files_that_cannot_be_read(tmp_path: Path, what: str) -> None:
    name, text, columns, due = BAD[what]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(rt.InvalidInput, match=due):
        read_events(tmp_path / name, columns=columns)


def test_ratings_that_are_asked_for_and_not_there(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("user,item,timestamp\n1,2,3\n")
    with pytest.raises(rt.InvalidInput, match="event 1 cannot be read: it has no rating, and least_rating is 4; leave"):
        read_events(file, least_rating=4)
    assert len(read_events(file).items) == 1


DAMAGED = {
    "not UTF-8": ("x.csv", b"user,item,timestamp\n1,\xe9,3\n", "cannot be read: 'utf-8' codec"),
    "a field without an end": ("x.csv", b"user,item,timestamp\n1," + b"a" * 200_000 + b",3\n", "larger than field limit"),
    "no gzip": ("x.csv.gz", b"user,item,timestamp\n", "Not a gzipped file"),
    "half of a gzip": ("x.csv.gz", gzip.compress(b"user,item,timestamp\n" + b"1,2,3\n" * 9)[:-12], "Compressed file ended"),
    "a rating of NaN": ("x.csv", b"user,item,rating,timestamp\n1,2,nan,3\n", "event 1 cannot be read: its rating is NaN"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files(tmp_path: Path, what: str) -> None:
    name, content, due = DAMAGED[what]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(rt.InvalidInput, match=due):
        read_events(tmp_path / name, least_rating=3 if "rating" in what else None)


@pytest.mark.parametrize("columns", ["user,item,timestamp", (1, 2, 3), ("user", "item", "User", "timestamp")])
def test_columns_that_name_none(tmp_path: Path, columns: Any) -> None:
    (tmp_path / "x.csv").write_text("1,2,3\n")
    with pytest.raises(rt.InvalidInput, match=r"columns is .*; must"):
        read_events(tmp_path / "x.csv", columns=columns)


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_moments_become_seconds(tmp_path: Path, unit: int) -> None:
    (tmp_path / "x.csv").write_text(f"user,item,timestamp\n1,2,{1_700_000_000 * unit}\n")
    assert read_events(tmp_path / "x.csv").times.tolist() == [1_700_000_000]


def test_distances_of_other_kinds() -> None:
    found = [
        planted_events(3, 40, distances=distances, generator=torch.Generator().manual_seed(0)).events.items
        for distances in ((5, 20), np.array([5, 20]), torch.tensor([5, 20]))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with pytest.raises(rt.InvalidInput, match="distances is 5; must be several numbers"):
        planted_events(3, 40, distances=5)  # type: ignore[arg-type]
    with pytest.raises(rt.InvalidInput, match="share is 'a'; must be a finite number"):
        planted_events(3, 80, share="a")  # type: ignore[arg-type]


def test_a_batch_has_the_events_of_its_users() -> None:
    events = Events(torch.tensor([4, 2, 3, 1]), torch.tensor([0, 1, 1, 4]), torch.arange(4), 5)
    batch = events.of_users(torch.tensor([2, 1, 0, 2]))
    assert batch.items.tolist() == [2, 3, 1, 4, 2, 3, 1]
    assert batch.cu.tolist() == [0, 3, 3, 4, 7]
    assert batch.times.tolist() == [1, 2, 3, 0, 1, 2, 3]
    assert len(events.of_users(torch.tensor([], dtype=torch.long)).items) == 0


def test_planted_users_return_to_the_groups_that_they_like() -> None:
    """Each distance is found anew from the items alone, and items of one user and category are of one group."""
    users, length, categories, groups, per_group = 30, 150, 12, 6, 4
    events, distance = planted_events(
        users, length, distances=(2, 10, 60), categories=categories, groups=groups, per_group=per_group,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    count = categories * groups * per_group
    assert events.item_count == count + 2 * categories
    assert int(events.items.max()) < events.item_count
    items, due = events.items.view(users, length), distance.view(users, length)
    for row, distances in zip(items.tolist(), due.tolist(), strict=True):
        liked, last, sign = {}, {}, None
        for at, (item, back) in enumerate(zip(row, distances, strict=True)):
            if item >= count:
                assert back == 0
                sign = item - count if item < count + categories else None
                continue
            category, group = item // (groups * per_group), item // per_group
            # a sign tells the category of the items behind it
            assert sign == category
            assert liked.setdefault(category, group) == group
            assert back == (at - last[category] if category in last else 0)
            last[category] = at
        assert count <= row[-2] < count + categories
        assert row[-1] < count
    returns = due[due > 1].bincount()
    assert set(returns.topk(3).indices.tolist()) == {2, 10, 60}
    # about as many events belong to visits as were asked for
    assert ((items < count + categories).float().mean() - 0.8).abs() < 0.05
    with pytest.raises(rt.InvalidInput, match="numbers of 2 to 9"):
        planted_events(2, 10, distances=(10,))
    with pytest.raises(rt.InvalidInput, match=r"share is 0; must be above 0"):
        planted_events(2, 20, distances=(3,), share=0)
