"""The studies of context and of trained experts, tiny, and suites whose cases run in several processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooftile.errors import InvalidInput
from rooftile_lab.bench import side_by_side
from rooftile_lab.bench.learning import expert_training as experts
from rooftile_lab.bench.learning.english import English, corpus, library
from rooftile_lab.bench.learning.methods import EXACT, HYBRID, METHODS, mixers_of
from rooftile_lab.bench.suites import context, expert_training, recall
from tests.bench.session import SESSION

CPU = torch.device("cpu")
CONTEXT = replace(context.PLANS["cpu"], contexts=(16, 40), steps=2)
EXPERTS = replace(expert_training.PLANS["cpu"], hidden=32, layers=2, experts=8, width=8, batch=2, length=32, steps=3, tests=4)


def quiet(words: str) -> None:
    """No progress."""


@pytest.mark.parametrize("plan", context.PLANS.values(), ids=context.PLANS)
def test_models_have_as_many_parameters_and_the_hybrid_attends_twice(plan: context.Plan) -> None:
    configs = {name: context.config_of(name, plan) for name in context.MODELS}
    due = context.parameters(configs["attention"])
    assert all(abs(context.parameters(config) / due - 1) < 0.01 for config in configs.values())
    assert {name: config.mixers.count("attention") for name, config in configs.items()} == {
        "attention": plan.layers, "hybrid": 2, "mamba2": 0,
    }  # fmt: skip


def test_memory_of_a_sequence_is_blocks_of_attending_layers_and_states_of_the_others() -> None:
    found = {(row.backend, row.phase, row.case): row for row in context.measure(SESSION, context.MODELS, quiet, CONTEXT)}
    assert not any(row.reason for row in found.values())
    assert len(found) == 3 * 2 * 2
    nbytes = {
        (model, case): row.measures["sequence_bytes"] for (model, phase, case), row in found.items() if phase == "write"
    }  # fmt: skip
    # keys and values of 2 heads of 16 dims in fp32; 16 tokens and an answer take two blocks, 40 tokens three or four
    block = 16 * 2 * 2 * 16 * 4
    # 8 heads of 16 x 32 numbers, and three inputs of 8 x 16 + 2 x 32 numbers
    state = 4 * (8 * 16 * 32 + 3 * (8 * 16 + 2 * 32))
    assert nbytes["attention", "context-16"] == pytest.approx(4 * 2 * block, rel=1e-4)
    assert (nbytes["hybrid", "context-40"] - 2 * state) / (2 * block) in (3, 3.5, 4)
    assert nbytes["mamba2", "context-16"] == nbytes["mamba2", "context-40"] == pytest.approx(4 * state, rel=1e-4)
    read, written = (found["hybrid", phase, "context-40"] for phase in ("read", "write"))
    assert read.measures["read_us"] == pytest.approx(read.median_us / 40, rel=1e-4)
    assert written.measures["write_us"] == pytest.approx(written.median_us / CONTEXT.batch, rel=1e-4)
    assert read.settings["attending_layers"] == 2


def test_a_model_that_cannot_be_served_is_a_row_with_a_reason_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = context._timed

    def failing(llm, plan, tokens):
        if not llm.caches.places:
            raise RuntimeError("no kernel")
        return timed(llm, plan, tokens)

    monkeypatch.setattr(context, "_timed", failing)
    found = list(context.measure(SESSION, ("mamba2", "attention"), quiet, replace(CONTEXT, contexts=(16,))))
    assert [(row.backend, row.reason) for row in found] == [
        ("mamba2", "failed: RuntimeError: no kernel"), ("attention", ""), ("attention", ""),
    ]  # fmt: skip


def test_experts_have_the_dense_width_and_all_kinds_are_rows() -> None:
    found = {row.backend: row for row in expert_training.measure(SESSION, experts.KINDS, quiet, plan=EXPERTS)}
    assert list(found) == ["dense", "balanced", "unbalanced"]
    assert EXPERTS.active_width == 4 * 8
    dense = experts.decoder_of("dense", EXPERTS)
    assert {layer.config.ffn if hasattr(layer, "config") else dense.config.ffn for layer in dense.layers} == {32}
    for kind in ("balanced", "unbalanced"):
        loads = torch.tensor(found[kind].settings["loads"])
        assert loads.shape == (2, 8)
        # over the mean, so each layer has one on average
        torch.testing.assert_close(loads.mean(1), torch.ones(2), atol=1e-3, rtol=0)
        assert found[kind].measures["busiest_load_ratio"] == pytest.approx(float(loads.max()), abs=1e-3)
        assert found[kind].measures["idle_experts"] == int((loads < 0.1).sum())
    assert "busiest_load_ratio" not in found["dense"].measures
    assert found["balanced"].settings["parameters"] == found["unbalanced"].settings["parameters"]
    with pytest.raises(InvalidInput, match="there is no kind 'sparse'; has dense, balanced, unbalanced"):
        experts.decoder_of("sparse", EXPERTS)


def test_the_balance_loss_evens_the_loads() -> None:
    # a strong price, so that few steps show it
    plan = replace(EXPERTS, batch=8, steps=40, alpha=0.3, rate=1e-2)
    text = English.read("cpu")
    with torch.random.fork_rng(devices=[]):
        busiest = {
            kind: max(max(layer) for layer in experts.learn(kind, plan, text, CPU, quiet).loads)
            for kind in (experts.BALANCED, experts.UNBALANCED)
        }
    assert busiest[experts.BALANCED] < busiest[experts.UNBALANCED]


def test_the_hybrid_attends_in_every_second_layer_and_last() -> None:
    names = [mixer["name"] for mixer in mixers_of(HYBRID, 64, 4)]
    assert names == ["mamba2", "attention", "mamba2", "attention"]
    assert [mixer["name"] for mixer in mixers_of(HYBRID, 64, 1)] == ["attention"]
    assert {mixer["name"] for mixer in mixers_of("delta", 64, 3)} == {"delta"}


def test_the_long_text_begins_with_the_short_one_and_goes_on_with_docstrings() -> None:
    short, long = corpus(), library()
    assert torch.equal(long[: len(short)], short)
    assert len(long) > 2 * len(short)
    # str.split's own words, in one line
    assert b"Return a list of the" in bytes(long.tolist()) or b"iterable" in bytes(long[len(short) :].tolist())
    assert torch.equal(library(), long)


# several processes


def test_cases_of_a_method_share_a_process() -> None:
    groups = recall.groups_of(["recall-exact", "recall-linear", "english-exact", "english-linear", "needle"])
    assert groups == [["recall-exact", "english-exact", "needle"], ["recall-linear", "english-linear"]]
    assert len(recall.groups_of(recall.GPU)) == len(METHODS)
    assert recall.groups_of(["needle"]) == [["needle"]]
    assert EXACT in METHODS


def test_rows_of_processes_have_one_date_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(context.measure(SESSION, ("mamba2",), quiet, replace(CONTEXT, contexts=(16,))))
    lines = [replace(row, date="2020-01-01T00:00:00+00:00").json() for row in found]
    failing = {"b": ([lines[1]], "failed with 1: RuntimeError: no kernel")}
    monkeypatch.setattr(side_by_side, "_run", lambda session, suite, group: failing.get(group[0], (lines, "")))
    rows = list(side_by_side.side_by_side(SESSION, "context", [["a"], ["b", "c"]], 2, quiet))
    assert {row.date for row in rows} == {SESSION.date}
    assert all(row.median_us is None and row.samples is None for row in rows)
    assert sorted(row.reason for row in rows) == ["", "", "", *["failed with 1: RuntimeError: no kernel"] * 2]
    measured = [row for row in rows if not row.reason]
    assert all(row.settings["side_by_side"] == 2 and row.measures["context_tokens"] == 16 for row in measured)
    assert [row.case for row in rows if row.reason] == ["b", "c"]


def test_a_process_that_knows_no_such_case_fails_in_a_sentence() -> None:
    lines, reason = side_by_side._run(SESSION, "expert-training", ["sparse"])
    assert lines == []
    assert reason.startswith("failed with ")
    assert "sparse" in reason
