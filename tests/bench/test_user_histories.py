"""The study of users' histories: what a length makes possible, what a model reaches, and the bytes that are counted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rooftile.recommend.data import Events
from rooftile.recommend.hstu import attention as hstu_operator
from rooftile.recommend.target import operator as target_operator
from rooftile_lab.bench.learning import clicks
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
    (found,) = learn("din", plan, torch.device("cpu"))
    assert found.within > 0.95
    assert abs(found.auc - found.possible) < 0.05
    assert found.possible < 0.85
    # the last 16 events tell nothing of interests that lie further back
    assert abs(found.far - 0.5) < 0.1


@pytest.mark.parametrize("method", METHODS)
def test_everything_is_on_the_device_of_the_session(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # tensors of this device have no numbers: most operations that join them with tensors of the host fail, and so does a read
    meta, real = torch.device("meta"), clicks.logits

    def checked(method: str, model: nn.Module, events: Events, candidates: Tensor) -> Tensor:
        assert {x.device for x in (*events[:3], candidates)} == {meta}
        found = real(method, model, events, candidates)
        assert found.device == meta
        return found if torch.is_grad_enabled() else torch.zeros(found.shape)

    for module in (clicks, user_histories):
        monkeypatch.setattr(module, "logits", checked)
    for operator in (target_operator, hstu_operator):
        monkeypatch.setattr(operator, "_run", operator._fake)
        monkeypatch.setattr(operator, "_run_backward", operator._fake_backward)
    monkeypatch.setattr(torch, "autocast", lambda *given, **named: nullcontext())
    plan = replace(SMALL, stages=SMALL.stages[:1])
    (row,) = user_histories.measure(replace(SESSION, device=meta), [method], lambda words: None, plan)
    assert row.measures["all_auc"] == 0.5


def test_a_method_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_histories, "bytes_read", lambda method, *given: 1 // (method != "eta"))
    plan = replace(SMALL, stages=SMALL.stages[:1])
    failed, right = user_histories.measure(SESSION, ["eta", "din"], lambda words: None, plan)
    assert (failed.backend, failed.reason) == ("eta", "failed: ZeroDivisionError: integer division or modulo by zero")
    assert (right.backend, right.reason, right.case) == ("din", "", "last-16")


def test_bytes_are_of_rows_in_fp32() -> None:
    plan = Plan(stages=(), whole=64, test_candidates=3, dim=8, heads=2, top_k=5, bits=32)
    found = 3 * 5 * 2 * 8 * 4
    due = {"din": 64 * 64, "hstu": 64 * 64, "sim-soft": 64 * 32, "sim-hard": 64 * 8, "eta": 64 * 8, "twin": 64 * 40}
    for name, whole in due.items():
        assert bytes_read(name, plan, 64) == whole + (0 if name in ("din", "hstu") else found)
