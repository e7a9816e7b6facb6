"""Fused experts, Conv1D and nn.MultiheadAttention are prepared; a line says which share of the weights is, and what is not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.weights.two_four import Recipe
from tests.qat.models import mlp
from tests.qat.test_prepare import Tied
from tests.qat.test_read_weights import made


class Experts(nn.Module):
    """Fused experts like those of Transformers, with the attributes that its decorator sets."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.has_gate, self.is_transposed = False, is_transposed
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(3, 64, 32)), nn.Parameter(torch.randn(3, 32, 64))
        self.up_proj_bias = nn.Parameter(torch.randn(3, 64))

    def forward(self, x: Tensor, at_once: bool = False) -> Tensor:
        def weight(stored: Tensor, n: int | Tensor) -> Tensor:
            one = stored.unbind()[n] if at_once else stored[n]
            return one.mT if self.is_transposed else one

        names = ("down_proj", "up_proj") if self.is_transposed else ("up_proj", "down_proj")
        total = torch.zeros(())
        for n in (0, torch.tensor(1), 2):
            hidden = nn.functional.linear(x, weight(getattr(self, names[0]), int(n) if at_once else n))
            total = total + nn.functional.linear(hidden, weight(getattr(self, names[1]), int(n) if at_once else n))
        return total


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("format", ["int4:32", "int8", "mxfp4", "nvfp4"])
def test_fused_experts_are_rounded_along_their_inputs(format: str, is_transposed: bool, at_once: bool) -> None:
    plain, x = Experts(is_transposed), torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    by_hand = copy.deepcopy(plain)
    for name in ("up_proj", "down_proj"):
        stored = getattr(plain, name).detach()
        rows = (stored.mT if is_transposed else stored).flatten(0, 1)
        kind, _, group = format.partition(":")
        numbers = rt.quantise_weight(rows, kind, group=int(group) if group else None).dequantise()
        shaped = numbers.view(3, -1, rows.shape[1])
        getattr(by_hand, name).data.copy_(shaped.mT if is_transposed else shaped)
    model = rt.qat.prepare(nn.Sequential(copy.deepcopy(plain)), format)
    assert [one.name for one in rt.qat.status(model).layers] == ["0.up_proj", "0.down_proj"]
    y, due = model[0](x, at_once), by_hand(x, at_once)
    torch.testing.assert_close(y, due)
    y.sum().backward()
    due.sum().backward()
    for name, p in model[0].named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, getattr(by_hand, name).grad)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other[0](x, at_once), y)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert {one.steps for one in rt.qat.status(other).layers} == {1}
    assert {one.steps for one in rt.qat.status(model).layers} == {0}
    with rt.qat.off(model):
        assert torch.equal(model[0](x, at_once), plain(x, at_once))
    converted = rt.qat.convert(copy.deepcopy(model))
    assert type(converted[0]) is Experts
    torch.testing.assert_close(converted[0](x, at_once), due)
    assert dict(converted.state_dict()).keys() == dict(nn.Sequential(plain).state_dict()).keys()
    rt.qat.restore(model)
    assert type(model[0]) is Experts
    assert vars(model[0]).keys() == vars(plain).keys()
    assert torch.equal(model[0](x), plain(x))


def test_experts_that_tiles_would_cross() -> None:
    with pytest.raises(InvalidInput, match=r"^0.up_proj has experts of 64 rows, which tiles of 128 would cross; skip it, or"):
        rt.qat.prepare(nn.Sequential(Experts(False)), "fp8_tile")


LINES: dict[str, tuple[Callable[[], object], str]] = {
    "mixtral": (
        lambda: rt.qat.prepare(made("mixtral")[0], "int4:32"),
        "prepared: 27,648 of 30,976 weights (89.3%); left out: 1,600 in embeddings (model.embed_tokens.weight), 1,600 in linear "
        "layers that stay (lm_head.weight), 128 in MixtralTopKRouter.weight (model.layers.0.mlp.gate.weight)",
    ),
    "mixtral, 2:4": (
        lambda: rt.qat.prepare(made("mixtral")[0], None, sparsity=Recipe()),
        "prepared: 3,072 of 30,976 weights (9.9%); left out: 24,576 in fused experts (model.layers.0.mlp.experts.gate_up_proj "
        "and 1 more), 1,600 in embeddings (model.embed_tokens.weight), 1,600 in linear layers that stay (lm_head.weight), 128 in "
        "MixtralTopKRouter.weight (model.layers.0.mlp.gate.weight)",
    ),
    "gpt2": (
        lambda: rt.quantise_model(made("gpt2")[0], "int8"),
        "quantised: 12,288 of 14,528 weights (84.6%); left out: 2,240 in embeddings (transformer.wte.weight and 1 more)",
    ),
    "encoder layer": (lambda: rt.qat.prepare(made("encoder layer")[0], "int8"), "prepared: 8,192 of 8,192 weights (100.0%)"),
    "encoder layer, 2:4": (
        lambda: rt.qat.prepare(made("encoder layer")[0], "int8", sparsity=Recipe()),
        "prepared: 4,096 of 8,192 weights (50.0%); left out: 4,096 in projections of nn.MultiheadAttention "
        "(0.self_attn.in_proj_weight and 1 more)",
    ),
    "subclass": (
        lambda: rt.qat.prepare(nn.Sequential(type("Mine", (nn.Linear,), {})(8, 8), nn.Linear(8, 8), nn.Conv2d(2, 2, 2)), "int8"),
        "prepared: 64 of 144 weights (44.4%); left out: 64 in Mine, a subclass of nn.Linear (0.weight), 16 in convolutions "
        "(2.weight)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_one_line_says_what_is_covered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    call, due = LINES[name]
    model = call()
    assert capsys.readouterr().out == f"{due}\n"
    if "quantised" not in due:
        assert str(rt.qat.status(model)).splitlines()[-1] == due


def test_the_line_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rt.qat.prepare(mlp(), "int8", verbose=False)
    rt.quantise_model(mlp(), "int8", verbose=False)
    rt.plan(mlp(), torch.randn(2, 128), formats=["int8"], measure=False).prepare(mlp())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("format", "sentence"),
    [
        ({"lm_head": "int8"}, "lm_head and embedding share a weight, and only lm_head is prepared; prepare both, or neither"),
        ({"embedding": "int8"}, "embedding and lm_head share a weight, and only embedding is prepared"),
        ({"embedding": "int8", "lm_head": "fp8"}, "embedding is int8 and lm_head fp8, and they share a weight; prepare both"),
    ],
)
def test_a_head_that_is_its_embedding_is_refused_at_once(format: dict[str, str], sentence: str) -> None:
    for change in (rt.qat.prepare, rt.quantise_model):
        model = Tied()
        with pytest.raises(InvalidInput, match=f"^{sentence}"):
            change(model, format)
        assert [type(layer) for layer in model.children()] == [nn.Embedding, nn.Linear, nn.Linear]


def test_whispers_head() -> None:
    model, _ = made("whisper")
    with pytest.raises(InvalidInput, match=r"^proj_out and model.decoder.embed_tokens share a weight.*skip=\['proj_out'\]"):
        rt.qat.prepare(model, "int4:32")
