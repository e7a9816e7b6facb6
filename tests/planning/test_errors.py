"""A plan refuses bad input in one sentence; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rooftile as rt
from rooftile.cli.app import app
from rooftile.planning import Plan
from tests.planning.machine import Pretended
from tests.planning.models import inputs, llama, mlp, tokens

X = inputs()


class Selective(nn.Module):
    """A module whose layer some inputs do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] < 100 else self.layer(x)


def lost() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[2].weight[3, 5] = torch.nan
    return model


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128, device="meta"))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.GELU, {}, "GELU has no linear layer of the class nn.Linear itself, so there is nothing to plan"),
        (Selective, {}, "the inputs reach none of the 1 linear layers of Selective; give inputs that do"),
        (on_two_devices, {}, "the model and its inputs are on cpu and meta; must be on one device: move them"),
        (mlp, {"max_loss": -1}, "max_loss is -1; must be a number, 0 or more, or None"),
        (mlp, {"max_loss": float("nan")}, "max_loss is nan; must be a number"),
        (mlp, {"max_loss": "much"}, "max_loss is 'much'; must be a number"),
        (mlp, {"max_loss": True}, "max_loss is True; must be a number"),
        (mlp, {"formats": []}, "formats is .*; must name at least one"),
        (mlp, {"formats": 3}, "formats is 3; must be names of formats, such as"),
        (mlp, {"skip": None}, "skip is None; must be patterns of names, such as"),
        (mlp, {"data": lambda model: None}, "data returns NoneType; must return the model's loss, one number"),
        (mlp, {"data": lambda model: model(X)}, r"data returns a tensor \(.*\); must return the model's loss, one number"),
        (mlp, {"formats": ["int3"]}, "format is 'int3'; must be one of"),
        (mlp, {"formats": ["int4:half"]}, "format is 'int4:half'; after the colon"),
        (mlp, {"rows": {"decode": 4}}, "rows is .* and the model a module; leave it out"),
        (mlp, {"shares": {"decode": 4}}, "shares is .* and the model a module; leave it out"),
        (mlp, {"skip": ["head"]}, "skip has the pattern 'head', which matches no layer; near names are"),
        (mlp, {"context": 1024}, "context is 1024 and the model a module; leave it out"),
        (mlp, {"device": "cpu"}, "device is 'cpu' and the model a module; move it and its inputs there"),
        (mlp, {"data": 5}, "data is int; must be a function of the model, a tensor of token ids"),
        (mlp, {"data": []}, "data has no batch"),
        (mlp, {"data": [5]}, "data has a batch of int"),
        (mlp, {"data": torch.randn(3, 4)}, "data has torch.float32"),
        (mlp, {"data": lambda model: float("inf")}, "the loss on data is inf; must be finite"),
        (mlp, {"budget": 5}, "plan has no argument budget: it has model, rows, formats, data, max_loss"),
        (lost, {"formats": ["int8"]}, "2.weight cannot be quantised to int8: weight is nan at row 3, column 5"),
        (lambda: rt.qat.prepare(mlp(), "int8"), {}, "0 is prepared for training; restore the model first"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(rt.InvalidInput, match=words) as caught:
        rt.plan(model(), X, **options)
    assert "\n" not in str(caught.value)


def test_a_model_without_numbers_is_refused() -> None:
    with pytest.raises(rt.InvalidInput, match="the model and its inputs are on meta, where tensors have no numbers; move them"):
        rt.plan(mlp().to("meta"), X.to("meta"))


def test_a_tiny_loss_is_a_loss() -> None:
    assert rt.plan(mlp(), X, formats=["bf16", "int8"], max_loss=1e-310, measure=False).weights == "auto"


def test_a_loss_that_no_choice_meets_names_the_least_possible() -> None:
    plan = rt.plan(mlp(), X, formats=["int8", "int4"], measure=False)
    least = sum(min(option.loss for option in layer.options) for layer in plan.layers)
    with pytest.raises(rt.InvalidInput, match=f"max_loss is 1e-06, and the least possible sum of losses is {least:.3g}"):
        rt.plan(mlp(), X, formats=["int8", "int4"], max_loss=1e-6, measure=False)


def test_a_module_needs_inputs_by_position() -> None:
    with pytest.raises(rt.InvalidInput, match="no inputs are given for the module; give its forward's arguments, as in"):
        rt.plan(mlp())
    with pytest.raises(rt.InvalidInput, match=r"no argument input_ids: inputs come by position: rooftile.plan\(model, x\)"):
        rt.plan(mlp(), input_ids=X)  # type: ignore[call-arg]


def test_times_far_above_the_ceilings_have_a_note(stopwatch: Pretended) -> None:
    stopwatch.factor = 4.0
    assert not any("ceilings allow" in note for note in rt.plan(mlp(), X, formats=["bf16"]).notes)
    stopwatch.factor = 40.0
    plan = rt.plan(mlp(), X, formats=["bf16"])
    assert "the layers as they are take 40 times what the ceilings allow: if other programs run" in str(plan.notes)


def test_2_4_is_a_default_where_losses_are_bounded_and_is_refused_where_it_does_not_fit() -> None:
    def offered(**options: Any) -> list[str]:
        return [option.format for option in rt.plan(mlp(), X, measure=False, **options).layers[0].options]

    assert offered() == ["fp32", "fp8", "int8", "int4"]
    assert offered(max_loss=0.1) == ["fp32", "fp8", "int8", "int4", "2:4"]
    # losses of a format without training say nothing about a training step
    assert offered(max_loss=0.1, backward=True) == ["fp32", "fp8", "int8", "int4"]
    with pytest.raises(rt.Unsupported, match="formats has '2:4', and plans of training round alone; leave it out"):
        rt.plan(mlp(), X, formats=["2:4"], backward=True)
    with pytest.raises(rt.InvalidInput, match=r"2.weight cannot be 2:4: weight is NaN"):
        rt.plan(lost(), X, formats=["2:4"], measure=False)
    plan = rt.plan(nn.Sequential(nn.Linear(6, 8)), torch.randn(2, 6), formats=["2:4"], measure=False)
    assert plan.layers[0].why_not["2:4"] == "rows have 6 numbers, and 2:4 needs a multiple of 4"


def test_a_format_that_does_not_fit_says_why_and_leaves_the_others() -> None:
    torch.manual_seed(0)
    plan = rt.plan(nn.Sequential(nn.Linear(96, 32)), torch.randn(4, 96), measure=False)
    (layer,) = plan.layers
    assert [option.format for option in layer.options] == ["fp32", "fp8", "int8"]
    assert "K must be a multiple" in layer.why_not["int4"]
    assert "K must be a multiple" in str(plan)


def test_a_format_that_nothing_multiplies_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 on a GPU without it is such a format."""

    def refuse(x: Any, weight: Any, bias: Any) -> Any:
        if weight.format == "fp8":
            raise rt.Unsupported("no FP8 here\nmore words")
        return rt.linear(x, weight, bias)

    monkeypatch.setattr("rooftile.planning.timing.linear", refuse)
    plan = rt.plan(mlp(), X, formats=["bf16", "fp8", "int8"])
    assert all([option.format for option in layer.options] == ["fp32", "int8"] for layer in plan.layers)
    assert plan.layers[0].why_not == {"fp8": "no FP8 here"}


def test_the_model_itself_may_be_the_layer() -> None:
    torch.manual_seed(0)
    plan = rt.plan(nn.Linear(128, 32), X, formats=["bf16", "int8"], measure=False)
    assert plan.layers[0].why_not == {"int8": "the model itself is the layer, which has no place for another"}
    assert plan.weights == "auto"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    torch.manual_seed(0)
    from rooftile.models import TrainableDecoder

    TrainableDecoder(256, hidden=64, heads=4, layers=1, ffn=128, max_len=64).save(path)
    (path / "text.txt").write_text("To be planned. " * 20)
    return path


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words, "--device", "cpu"])


def test_a_checkpoint_without_a_context_has_what_its_positions_allow(folder: Path) -> None:
    plan = rt.plan(folder, rows={"decode": 1}, formats=["bf16"], measure=False, device="cpu")
    at_most = rt.plan(folder, rows={"decode": 1}, formats=["bf16"], context=64, measure=False, device="cpu")
    assert plan.total == at_most.total
    assert command(str(folder), "--no-measure", "--data", str(folder / "text.txt")).exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shares": {"decode": "a"}}, "shares has 'a'; must have a number for each of decode"),
        ({"data": torch.full((1, 9), 256)}, "data has token ids from 256 to 256; the model has 0 to 255"),
        ({"data": torch.full((1, 9), -1)}, "data has token ids from -1 to -1; the model has 0 to 255"),
    ],
)
def test_a_checkpoint_refuses_in_a_sentence(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(rt.InvalidInput, match=words):
        rt.plan(folder, rows={"decode": 1}, formats=["bf16"], measure=False, device="cpu", **options)


def test_the_command_prints_the_table_and_json(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = (str(folder), "--batch", "4", "--context", "32", "--max-loss", "0.01", "--data", str(folder / "text.txt"))
    shown = command(*words, "--prompt", "64", "--prompt-share", "0.25", "--html", str(page))
    assert shown.exit_code == 0, shown.output
    assert "layers.0.self_attn.q_proj, k_proj, v_proj" in shown.output
    assert "4/64, 64+64+64, 64" in shown.output
    assert "loss (nats)" in shown.output
    assert "<svg" in page.read_text()
    found = command(*words, "--formats", "bf16, int4:32", "--no-measure", "--json")
    assert found.exit_code == 0, found.output
    plan = Plan.from_json(found.output)
    assert json.loads(found.output)["total"]["max_loss"] == 0.01
    assert [option.format for option in plan.layers[0].options] == ["fp32", "int4:32"]
    assert plan.layers[0].loads[0].rows == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt-share", "2"), "--prompt-share is 2.0; must be from 0 to 1"),
        (("--prompt-share", "0.3"), "--prompt-share is 0.3 and no step reads prompts; give --prompt, or leave it out"),
        (("--html", "/nowhere/plan.html"), "cannot be written; name a file in a folder that exists"),
        (("--data", "/nowhere/text.txt"), "--data /nowhere/text.txt cannot be read"),
        (("--formats", "int5"), "format is 'int5'"),
        (("--context", "65"), "context is 65 tokens, and the model has 64 positions"),
    ],
)
def test_the_command_refuses_in_a_sentence(folder: Path, words: tuple[str, ...], message: str) -> None:
    found = command(str(folder), "--context", "32", *words)
    assert found.exit_code != 0
    assert message in str(found.exception) + found.output


def test_texts_of_a_module_may_be_batches_of_any_kind() -> None:
    data = tokens()
    one = rt.plan(llama(), data, data=data, formats=["bf16"], measure=False).total.base_loss
    other = rt.plan(llama(), data, data=[data[:1], data[1:]], formats=["bf16"], measure=False).total.base_loss
    pairs = rt.plan(llama(), data, data=((text[:-1][None], text[1:][None]) for text in data), formats=["bf16"], measure=False)
    assert one == pytest.approx(other, abs=1e-6) == pytest.approx(pairs.total.base_loss, abs=1e-6)
    mse = rt.plan(mlp(), X, data=(X, torch.zeros(8, 64)), formats=["bf16"], measure=False).total.base_loss
    assert mse == pytest.approx(mlp()(X).square().mean().item())
