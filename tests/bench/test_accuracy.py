"""`rooftile accuracy`: its distributions, its numbers, and a user's own tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rooftile as rt
from rooftile.cli import main
from rooftile_lab.bench import accuracy

CPU = torch.device("cpu")


def code_of(words: list[str]) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as done:
        main(words)
    return int(done.value.code or 0)


def test_distributions_are_what_they_say_and_the_same_each_time() -> None:
    shape = (1, 4000, 2, 64)
    (q, k, v), (q2, _, _) = accuracy.draws("outliers", shape, 2, torch.float32, CPU)
    for x in (q, k, v):
        assert abs(x.var() - 1.1) < 0.05
        assert 0.0004 < (x.abs() > 6).float().mean() < 0.0008
    assert not torch.equal(q, q2)
    ((again, _, _),) = accuracy.draws("outliers", shape, 1, torch.float32, CPU)
    assert torch.equal(q, again)
    ((q, _, _),) = accuracy.draws("gaussian", shape, 1, torch.bfloat16, CPU)
    assert q.dtype == torch.bfloat16
    assert q.abs().max() < 6
    ((q, k, v),) = accuracy.draws("sink", shape, 1, torch.float32, CPU)
    weights = torch.einsum("bthd,bshd->bhts", q, k).mul(64**-0.5).softmax(-1)
    assert 0.5 < weights[..., 0].mean() < 0.98
    assert v[:, 0].abs().max() < 0.1


def test_losses_are_errors_against_the_definition() -> None:
    inputs = list(accuracy.draws("outliers", (1, 300, 2, 64), 2, torch.bfloat16, CPU))
    recipes = {name: accuracy.RECIPES[name] for name in ("native", accuracy.PLAINEST, "int8")}
    found = {loss.recipe: loss for loss in accuracy.losses(iter(inputs), rt.CAUSAL, lambda words: None, recipes)}
    assert list(found) == list(recipes)
    due, ratios = [], []
    for q, k, v in inputs:
        exact = rt.attention(q.double(), k.double(), v.double(), rt.CAUSAL)
        errors = [rt.attention(q, k, v, rt.CAUSAL, precision=recipes[name]) - exact for name in ("int8", accuracy.PLAINEST)]
        ours, plainest = (error.square().mean().sqrt().item() for error in errors)
        due.append((ours, errors[0].abs().max().item()))
        ratios.append(plainest / ours)
    rmse, largest = (sum(column) / 2 for column in zip(*due, strict=True))
    assert found["int8"].rmse == pytest.approx(rmse)
    assert found["int8"].largest == pytest.approx(largest)
    assert found["int8"].better == pytest.approx(sum(ratios) / 2)
    assert found[accuracy.PLAINEST].better == 1
    assert found["native"].rmse < found["int8"].rmse < found[accuracy.PLAINEST].rmse
    assert found["native"].cosine > found["int8"].cosine > 0.9
    assert found["native"].lse < found["int8"].lse < 0.5
    assert found["int8"].ran == "eager"
    assert found["int8"].precision == "int8/fp8/block/11"
    assert all(loss.time_us > 0 for loss in found.values())


def test_the_command_prints_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["accuracy", "--distribution", "gaussian", "--dim", "32", "--length", "100", "--heads", "1", "--draws", "1"]
    assert code_of(words) == 0
    text = capsys.readouterr().out
    assert "gaussian, 1 draws of 1 heads, 100 tokens, head dim 32, bf16, full" in text
    for name in accuracy.RECIPES:
        assert f"\n{name} " in text
    assert code_of([*words, "--json", "--mask", "causal", "--dtype", "fp32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in found["recipes"]] == list(accuracy.RECIPES)
    assert found["what"].endswith("fp32, causal")


def test_tensors_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = torch.randn(1, 60, 4, 32), torch.randn(1, 90, 2, 32), torch.randn(1, 90, 2, 32)
    torch.save({"q": q, "k": k, "v": v}, tmp_path / "mine.pt")
    assert code_of(["accuracy", "--tensors", str(tmp_path / "mine.pt"), "--json"]) == 0
    found = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}
    error = rt.attention(q, k, v, precision="fp8") - rt.attention(q.double(), k.double(), v.double())
    assert found["fp8"]["rmse"] == pytest.approx(error.square().mean().sqrt().item())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--distribution", "cauchy"], "distribution is 'cauchy'; has outliers, gaussian, sink"),
        (["--mask", "up"], "--mask is 'up'; has full, causal"),
        (["--dtype", "fp64"], "--dtype is 'fp64'; must be one of bf16 (bfloat16), fp16"),
        (["--dim", "20"], "head dim 20 has no Hadamard transform"),
        (["--tensors", "nowhere.pt"], "--tensors is nowhere.pt, which is no file"),
        (["--tensors", "text.pt"], "text.pt is no file of tensors; save a dictionary of q, k and v with torch.save"),
        (["--tensors", "half.pt"], "half.pt has no tensor 'k'; it must hold q"),
    ],
)
def test_a_users_mistake_is_one_sentence(words, sentence, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("q k v")
    torch.save({"q": torch.zeros(1, 2, 1, 16)}, "half.pt")
    assert code_of(["accuracy", "--length", "10", "--draws", "1", *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told


def test_the_finer_recipe_is_named_where_it_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row of queries and one of keys are 40 times larger, and share their blocks with the others."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 256, 4, 64)
    torch.save({"q": q, "k": k, "v": v}, tmp_path / "even.pt")
    q[:, 50] *= 40
    k[:, 70] *= 40
    torch.save({"q": q, "k": k, "v": v}, tmp_path / "uneven.pt")
    named = "Write precision=rooftile.Precision(qk='int8', granularity='row')"
    assert code_of(["accuracy", "--tensors", str(tmp_path / "uneven.pt")]) == 0
    told = capsys.readouterr().out.replace("\n", " ")
    assert "int8 with a scale per row has 0." in told
    assert named in told
    assert "fp8 with a scale per row" not in told
    assert code_of(["accuracy", "--tensors", str(tmp_path / "even.pt")]) == 0
    assert "Write precision" not in capsys.readouterr().out
