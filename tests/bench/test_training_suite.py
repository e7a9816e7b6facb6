"""The training suite: every contestant takes the same steps, and Rooftile stands behind its own alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from rooftile_lab.bench.suites import training
from tests.bench.session import SESSION


@pytest.mark.parametrize("name", ["tiny-bert-4x64"])
def test_steps_of_tiny_models_are_timed_and_compared_with_sdpa(name: str) -> None:
    recipe = training.RECIPES[name]
    found = list(training.measure(SESSION, [name], lambda words: None))
    assert [(row.backend, row.phase) for row in found] == [
        (contestant, phase) for contestant in training.CONTESTANTS for phase in training.PHASES
    ]
    times = {(row.backend, row.phase): row.median_us for row in found}
    assert [row.reason for row in found if row.backend == "fused"] == ["refused: bert; has llama, gpt2"] * 2
    for row in found:
        if row.reason:
            continue
        assert (row.suite, row.case, row.samples) == ("training", name, recipe.steps * recipe.rounds)
        assert row.measures["tok_s"] == pytest.approx(recipe.batch * recipe.length / row.median_us * 1e6, rel=1e-4)
        due = times["sdpa", row.phase] / row.median_us
        assert row.measures["of_sdpa_ratio"] == pytest.approx(due, rel=1e-4)
    assert all(times[name, "step"] > times[name, "fwd+bwd"] for name in ("eager", "sdpa", "rooftile"))
    assert found[0].settings["tokens"] <= recipe.batch * recipe.length


@pytest.mark.parametrize("name", training.CPU)
def test_all_contestants_learn_the_same(name: str) -> None:
    recipe = training.RECIPES[name]
    batch = training.batch_of(recipe, SESSION.device)
    losses = []
    known = [name for name in training.CONTESTANTS if not training._reason(name, recipe, SESSION)]
    assert ("fused" in known) == (recipe.family != "bert")
    for contestant in known:
        student = training.Student(contestant, recipe, SESSION, batch)
        student.train(2)
        assert {phase: len(taken) for phase, taken in student.taken.items()} == {"step": 2, "fwd+bwd": 2}
        losses.append(student.loss.item())
    assert max(losses) - min(losses) < 1e-4


def test_rooftile_is_enabled_in_its_own_turn_only() -> None:
    enabled = {}
    for contestant in training.CONTESTANTS:
        with training.attending(contestant):
            enabled[contestant] = training.rt.is_enabled()
    assert enabled == {"eager": False, "sdpa": False, "rooftile": True, "fused": True, "liger": True}
    assert not training.rt.is_enabled()


def test_eager_attention_is_refused_where_its_matrices_find_no_room() -> None:
    reason = training._reason("eager", training.RECIPES["llama-1b-1x32k"], SESSION)
    assert reason.startswith("refused: about 3584 GiB of T x S matrices; ")
    assert "liger-kernel" in training._reason("liger", training.RECIPES["tiny-llama-2x64"], SESSION)
    assert training._reason("sdpa", training.RECIPES["llama-1b-1x32k"], SESSION) == ""


def test_padded_batches_hide_their_padding_and_do_not_learn_it() -> None:
    recipe = training.RECIPES["bert-64x512"]
    batch = training.batch_of(recipe, torch.device("cpu"))
    lengths = batch["attention_mask"].sum(1)
    assert lengths.max() == 512
    assert lengths.min() >= 64
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
