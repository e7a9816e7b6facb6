"""The study of users' histories: what a length makes possible, what a model reaches, and the bytes that are counted."""

from __future__ import annotations

from rooftile_lab.bench.learning.clicks import METHODS, Plan, Stage, bytes_read, learn
from rooftile_lab.bench.suites import user_histories
from tests.bench.session import SESSION

SMALL = Plan(
    whole=64, stages=(Stage(length=16, steps=2, users=4), Stage(length=64, steps=2, users=4)), test_users=16, test_candidates=16,
)  # fmt: skip


def test_small() -> None:
    rows = list(user_histories.measure(SESSION, user_histories.CPU, lambda words: None, SMALL))
    assert [(row.backend, row.case) for row in rows] == [(name, f"last-{n}") for name in METHODS for n in (16, 64)]
    for row in rows:
        assert row.median_us is not None
        assert row.measures["possible_auc"] == (1.0 if row.case == "last-64" else rows[0].measures["possible_auc"])
    # clicks for interests of the last 16 events are half of all, and of the others a guess is right half of the time
    assert abs(rows[0].measures["possible_auc"] - 0.75) < 0.06


def test_a_model_reaches_what_is_possible() -> None:
    plan = Plan(
        whole=64, stages=(Stage(length=16, steps=120, users=32),), test_users=32, dim=16, categories=4, groups=4, per_group=1,
    )  # fmt: skip
    (found,) = learn("din", plan)
    assert found.within > 0.95
    assert abs(found.auc - found.possible) < 0.05
    assert found.possible < 0.85


def test_bytes_are_of_rows_in_fp32() -> None:
    plan = Plan(stages=(), whole=64, test_candidates=3, dim=8, heads=2, top_k=5, bits=32)
    found = 3 * 5 * 2 * 8 * 4
    due = {"din": 64 * 64, "hstu": 64 * 64, "sim-soft": 64 * 32, "sim-hard": 64 * 8, "eta": 64 * 8, "twin": 64 * 40}
    for name, whole in due.items():
        assert bytes_read(name, plan, 64) == whole + (0 if name in ("din", "hstu") else found)
