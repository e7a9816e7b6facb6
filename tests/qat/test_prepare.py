"""`prepare`, `restore`, `off`, `status`: parameters stay, and what cannot be prepared says so."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import InvalidInput
from tests.qat.models import FORMATS, inputs, mlp


class Tied(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 64, padding_idx=3)
        self.body = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 20, bias=False)
        if tie:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(self.embedding(tokens)))


def test_parameters_stay_the_same_tensors_under_the_same_names() -> None:
    model = mlp()
    before, bits = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    assert rt.qat.prepare(model, "int4:32") is model
    assert all(p is before[name] for name, p in model.named_parameters())
    assert len(list(model.parameters())) == len(before)
    plain = mlp(seed=5)
    assert plain.load_state_dict(model.state_dict()).missing_keys == []
    assert all(torch.equal(x, bits[name]) for name, x in plain.state_dict().items())
    other = rt.qat.prepare(mlp(seed=6), "fp8")
    other.load_state_dict(bits)
    assert all(torch.equal(x, bits[name]) for name, x in other.state_dict().items())
    assert isinstance(model[0], nn.Linear)
    assert rt.qat.restore(model) is model
    assert type(model[0]) is nn.Linear
    assert vars(model[0]).keys() == vars(mlp()[0]).keys()
    x = inputs()
    assert torch.equal(model(x), mlp()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_prepared_and_converted_layers_have_the_same_bits(format: str, dtype: torch.dtype) -> None:
    model, x = rt.qat.prepare(mlp(dtype=dtype), format), inputs(dtype=dtype)
    y = model(x)
    assert y.dtype == dtype
    codes = [layer.codes() for layer in model if isinstance(layer, nn.Linear)]
    converted = rt.qat.convert(copy.deepcopy(model))
    assert torch.equal(converted(x), y)
    assert torch.equal(converted(x.transpose(0, 1)).transpose(0, 1), model(x.transpose(0, 1)).transpose(0, 1))
    found = [layer.quantised for layer in converted if isinstance(layer, rt.qat.QuantisedLinear)]
    for one, due in zip(found, codes, strict=True):
        for part, other in zip(one.parts, due.parts, strict=True):
            assert part is other is None or torch.equal(part.view(torch.uint8), other.view(torch.uint8))
    again = rt.qat.convert(rt.qat.prepare(mlp(seed=9, dtype=dtype), format))
    again.load_state_dict(converted.state_dict())
    assert torch.equal(again(x), y)
    # it matters: the model without rounding says something else
    with rt.qat.off(model):
        assert not torch.equal(model(x), y)


def hostile(dtype: torch.dtype) -> nn.Linear:
    """A layer with rows of zeros, of one number, of large numbers, and of numbers so small that scales have a least value."""
    torch.manual_seed(4)
    made = nn.Linear(128, 12).to(dtype)
    with torch.no_grad():
        made.weight[1], made.weight[2], made.weight[3, :64] = 0.0, 0.25, 0.0
        made.weight[4], made.weight[5, 9] = made.weight[4] * 1e-6, 9.0
        for row, size in ((6, 1e-20), (7, 1e-30), (8, 1e-37), (9, 2e-38)):
            made.weight[row] = (torch.linspace(-1, 1, 128) * size).to(dtype)
        made.weight[10] = torch.linspace(-1, 1, 128) * 3e4
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_prepared_layer_is_the_product_that_a_server_makes_of_its_weight(format: str, dtype: torch.dtype) -> None:
    plain, x = hostile(dtype), inputs(dtype=dtype)
    layer = rt.qat.prepare(nn.Sequential(copy.deepcopy(plain)), format)[0]
    name, _, group = format.partition(":")
    served = rt.quantise_weight(plain.weight, name, group={"": None, "row": -1, "32": 32}[group])
    for part, due in zip(layer.codes().parts, served.parts, strict=True):
        assert part is due is None or torch.equal(part.view(torch.uint8), due.view(torch.uint8))
    assert torch.equal(layer(x), rt.linear(x, served, plain.bias))
    if name not in ("int4", "w8"):
        return
    # by its own words: the scale is rounded to bf16 first, and codes are those of the rounded scale
    half = 8.0 if name == "int4" else 128.0
    groups = plain.weight.detach().float().unflatten(1, (-1, served.group))
    scales = (groups.abs().amax(-1) / (half - 0.5)).clamp(min=2.0**-126).bfloat16()
    scales = torch.where(groups.abs().amax(-1) == 0, 1.0, scales)
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-half, half - 1)
    due = (codes * scales.float().unsqueeze(-1)).flatten(1)
    assert torch.equal(layer.codes().dequantise(), due)


def test_rounding_is_off_inside_the_block_and_before_its_step() -> None:
    model, plain, x = rt.qat.prepare(mlp(), "int4:32", start_step=2), mlp(), inputs()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    assert torch.equal(model(x), plain(x))
    for _ in range(2):
        optimiser.step()
    rounded = model(x)
    assert not torch.equal(rounded, plain(x))
    with rt.qat.off(model), rt.qat.off(model):
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), rounded)
    with pytest.raises(KeyError), rt.qat.off(model):
        raise KeyError
    assert torch.equal(model(x), rounded)


def test_patterns_choose_formats_and_layers() -> None:
    model = rt.qat.prepare(mlp(), {"0": "int4:32", "re:[24]$": "int8"})
    assert [one.format for one in rt.qat.status(model).layers] == ["int4:32", "int8", "int8"]
    model = rt.qat.prepare(mlp(), {"2": "auto", "*": "fp8"})
    assert [one.name for one in rt.qat.status(model).layers] == ["0", "4"]
    tied = rt.qat.prepare(Tied(), "int4:32")
    assert [one.name for one in rt.qat.status(tied).layers] == ["body"]
    both = rt.qat.prepare(Tied(), {"*": "int4:32"})
    assert [one.name for one in rt.qat.status(both).layers] == ["embedding", "body", "lm_head"]
    assert rt.qat.prepare(mlp(), "int4", group=np.int64(64))[0].codes().group == 64


def test_an_embedding_is_rounded_with_its_gradient() -> None:
    model = rt.qat.prepare(Tied(tie=False), {"embedding": "w8"})
    tokens = torch.tensor([[1, 3, 5], [5, 5, 0]])
    numbers = model.embedding.codes().dequantise()
    assert torch.equal(model.embedding(tokens), numbers[tokens])
    model.embedding(tokens).sum().backward()
    due = torch.tensor([1.0, 1, 0, 0, 0, 3]).repeat_interleave(64).view(6, 64)
    # 3 is padding
    assert torch.equal(model.embedding.weight.grad[:6], due)
    converted = rt.qat.convert(model)
    assert torch.equal(converted.embedding(tokens), numbers[tokens])


def test_copies_count_the_steps_of_their_own_optimiser() -> None:
    model = rt.qat.prepare(mlp(), "int8", start_step=1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert {one.steps for one in rt.qat.status(other).layers} == {1}
        assert {one.steps for one in rt.qat.status(model).layers} == {0}
    # an optimiser that holds one layer counts for that one
    torch.optim.SGD(model[0].parameters(), lr=0.1).step()
    assert [one.steps for one in rt.qat.status(model).layers] == [1, 0, 0]


def test_autocast_inference_mode_and_strides() -> None:
    model, x = rt.qat.prepare(mlp(), "int8"), inputs()
    converted = rt.qat.convert(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(converted(x), y)
        y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(model(x), converted(x))
    assert torch.equal(model(x.mT.contiguous().mT), model(x))
    assert torch.equal(model(x[0, 0]), converted(x[0, 0]))
    assert model(x[:, :0]).shape == (2, 0, 37)
    assert model(x.double()).dtype == torch.float64


def test_scales_keep_their_dtype_in_a_model_of_16_bits() -> None:
    converted = rt.qat.convert(rt.qat.prepare(mlp(), "int8"))
    layer = converted.to(torch.bfloat16)[0]
    assert layer.scales.dtype == torch.float32
    assert layer.bias.dtype == torch.bfloat16
    assert converted(inputs(dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_status_says_what_rounding_changes() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.zero_()
    found = rt.qat.status(rt.qat.prepare(model, "int4:32"))
    zero, other = found.layers[:2]
    assert (zero.error, zero.clipped) == (0.0, 0.0)
    assert 0.05 < other.error < 0.12
    assert 0 <= other.clipped < 0.05
    assert other.numbers == 256 * 128
    assert other.nbytes == 256 * 128 // 2 + 256 * 4 * 2
    lines = str(found).splitlines()
    assert len(lines) == 5
    assert lines[4] == "prepared: 70,272 of 70,272 weights (100.0%)"
    assert "int4:32" in lines[2]
    assert "PreparedLinear(in_features=128, out_features=256, bias=True, int4:32)" in repr(model)


@pytest.mark.parametrize(
    ("skip", "stay"),
    [
        (("lm_head",), []), ("lm_head", []), ((), []), ("2", ["2"]), (["0", "re:[4]$"], ["0", "4"]),
        # a layer that stays anyway: an activation
        (["1", "4"], ["4"]),
    ],
)  # fmt: skip
def test_patterns_choose_layers_that_stay(skip, stay: list[str]) -> None:
    model = rt.qat.prepare(mlp(), "int8", skip=skip)
    assert [name for name, layer in model.named_children() if type(layer) is nn.Linear] == stay


def inner() -> nn.Module:
    return nn.Sequential(OrderedDict(body=mlp()))


@pytest.mark.parametrize(
    ("model", "format", "skip", "sentence"),
    [
        (Tied, "int4:32", ["lm_haed"], "skip has the pattern 'lm_haed', which matches no layer; near names are lm_head, body"),
        # beside the default, the head's name counts as any other
        (mlp, "int8", ("lm_head", "0"), "skip has the pattern 'lm_head', which matches no layer; near names are"),
        # a name of what has layers inside would leave out none of them
        (inner, "int8", "body", "skip has the pattern 'body', which matches no layer; near names are body."),
        (mlp, "int8", [4], "skip has the pattern 4; must be a pattern of names, such as '*.mlp.*'"),
        (mlp, {4: "int8"}, (), "format has the pattern 4; must be a pattern of names"),
        (mlp, {"0": "int8"}, ["2"], "skip is ['2'] and format a dictionary; write {pattern: 'auto'} into it for what stays"),
    ],
)
def test_patterns_that_match_nothing(model, format, skip, sentence: str) -> None:
    for change in (rt.qat.prepare, rt.quantise_model):
        made = model()
        with pytest.raises(InvalidInput, match=re.escape(sentence)):
            change(made, format, skip=skip)
        assert not any(isinstance(layer, rt.qat.QuantisedLinear) or hasattr(layer, "qat") for layer in made.modules())


def uneven() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 4))


def lost() -> nn.Module:
    model = rt.qat.prepare(mlp(), "int8")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model[2].weight[1, 3] = torch.nan
    return model


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rt.qat.prepare(nn.Sequential(nn.ReLU()), "int8"), "Sequential has no layer of the class nn.Linear itself"),
        (lambda: rt.qat.prepare(mlp(), {"lm_haed": "int8"}), "pattern 'lm_haed', which matches no layer; near names are"),
        (lambda: rt.qat.prepare(rt.qat.prepare(mlp(), "int8"), "fp8"), "0 is prepared already; restore the model first"),
        (lambda: rt.qat.prepare(mlp(), "int5"), "format is 'int5'; must be one of fp8"),
        (lambda: rt.qat.prepare(mlp(), 8), "format is 8; must be one of fp8"),
        (lambda: rt.qat.prepare(mlp(), {"*": None}), "format is None and so is sparsity"),
        (lambda: rt.qat.prepare(mlp(), {}), "format leaves all 3 layers as they are"),
        (lambda: rt.qat.prepare(mlp(), {"*": "int4"}, group=32), "group is 32 and format a dictionary"),
        (lambda: rt.qat.prepare(mlp(), "int4:x"), "format is 'int4:x'; after the colon must be a group's size"),
        (lambda: rt.qat.prepare(mlp(), "int4", group=48), r"0.weight \(256, 128\) cannot be int4:48: group is 48"),
        (lambda: rt.qat.prepare(uneven(), "mxfp4"), r"0.weight \(4, 33\) cannot be mxfp4: weight has rows of K = 33"),
        (lambda: rt.qat.prepare(mlp(), "int8", estimator="ste"), "estimator is 'ste'; must be one of straight, clip, lsq"),
        (lambda: rt.qat.prepare(mlp(), "int8", start_step=-1), "start_step is -1; must be a number of steps, 0 or more"),
        (lambda: rt.qat.prepare("model", "int8"), "model is str; must be a torch.nn.Module"),
        (lambda: rt.qat.prepare(mlp(), "int4", group_size=32), "write group="),
        (lambda: rt.qat.prepare(nn.Sequential(nn.Embedding(4, 32, max_norm=1.0)), {"0": "w8"}), "0 is an embedding with max_n"),
        (lambda: rt.qat.convert(mlp()), "the model is not prepared; call rooftile.qat.prepare first"),
        (lambda: rt.qat.restore(mlp()), "the model is not prepared; call rooftile.qat.prepare first"),
        (lambda: rt.qat.status(mlp()), "the model is not prepared; call rooftile.qat.prepare first"),
        (lambda: rt.qat.off(mlp()).__enter__(), "the model is not prepared; call rooftile.qat.prepare first"),
        (lambda: lost()(inputs()), "2.weight after 1 steps cannot be quantised to int8: weight is nan at row 1, column 3"),
    ],
)  # fmt: skip
def test_bad_input(call, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        call()


def test_nothing_is_prepared_where_one_layer_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 4))
    with pytest.raises(InvalidInput, match=r"1\.weight"):
        rt.qat.prepare(model, "mxfp4")
    assert type(model[0]) is nn.Linear


def test_a_copy_that_is_made_without_rounding_rounds() -> None:
    """The best model of a run is often kept where it is measured."""
    model, x = rt.qat.prepare(mlp(), "int4:32"), inputs()
    with rt.qat.off(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert torch.equal(model(x), mlp()(x))
    for one in copies:
        assert torch.equal(one(x), model(x))
        assert not torch.equal(one(x), mlp()(x))


def test_restored_while_it_is_off() -> None:
    model = rt.qat.prepare(mlp(), "int8")
    with rt.qat.off(model):
        rt.qat.restore(model)
    assert torch.equal(model(inputs()), mlp()(inputs()))


def test_a_refused_mask_leaves_the_model_as_it_was() -> None:
    model = mlp()
    model[2].weight.data[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match=r"^2.weight cannot be 2:4: weight is NaN at row 0, column 0"):
        rt.qat.prepare(model, None, sparsity=rt.sparsity.Recipe())
    assert [type(layer) for layer in model] == [type(layer) for layer in mlp()]
    model[2].weight.data[0, 0] = 1.0
    rt.qat.prepare(model, "int8")(inputs())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sparsity", [None, rt.sparsity.Recipe()], ids=["", "2:4"])
def test_shapes_without_numbers(format: str, sparsity: rt.sparsity.Recipe | None) -> None:
    model = rt.qat.prepare(mlp(), format, sparsity=sparsity).to("meta")
    x = torch.empty(2, 5, 128, device="meta", requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (y.shape, y.device.type, x.grad.shape) == ((2, 5, 37), "meta", x.shape)
    assert model[0].weight.grad.shape == (256, 128)


PREPARE = partial(rt.qat.prepare, format="int8")
EMPTY = nn.Linear(64, 1)
EMPTY.weight = nn.Parameter(torch.empty(0, 64))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: PREPARE(mlp(), format="int4:32", group=64), "group is 64 and format 'int4:32', which has its own; leave"),
        (lambda: PREPARE(mlp(), skip=None), "skip is None; must be patterns of names, such as ('lm_head',), or ()"),
        (lambda: PREPARE(mlp(), format={"re:(": "int8"}), "the pattern 're:(' is no regular expression: "),
        (lambda: PREPARE(mlp(), format=["int4"]), "format is ['int4']; must be one of fp8, "),
        (lambda: PREPARE(mlp(), format="mxfp4", activations=["mxfp4"]), "activations are ['mxfp4']; must be 'mxfp4' or "),
        (lambda: PREPARE(nn.Sequential(EMPTY)), "0.weight (0, 64) has no numbers; skip this layer"),
        (lambda: rt.qat.load_state_dict(PREPARE(mlp()), 3), "state is int; must be what rooftile.qat.state_dict returned"),
        (lambda: PREPARE(mlp())(torch.ones(2, 128, dtype=torch.int64)), "x is torch.int64; must be a tensor of bfloat16, "),
        (lambda: rt.sparsity.Recipe(transposable="yes"), "transposable is 'yes'; must be True or False"),
        (lambda: rt.sparsity.two_four(torch.ones(4, 4), transposable="no"), "transposable is 'no'; must be True or False"),
        (lambda: rt.sparsity.TwoFour(None, None, (32, 64)), "values of a 2:4 weight (32, 64) are NoneType; must be a tensor "),
    ],
)  # fmt: skip
def test_arguments_of_another_kind(call, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(sentence)}"):
        call()


def test_numpys_integers_are_steps() -> None:
    assert rt.qat.prepare(mlp(), "int8", start_step=np.int64(3))[0].qat.start_step == 3


def test_a_rounded_embedding_and_head_of_one_weight() -> None:
    """Its gradient is the sum of both, and both are converted to the same numbers."""
    model, tokens = rt.qat.prepare(Tied(), {"*": "int8"}), torch.tensor([[1, 5, 3]])
    model(tokens).sum().backward()
    apart = rt.qat.prepare(Tied(tie=False), {"*": "int8"})
    apart.lm_head.weight.data.copy_(apart.embedding.weight.data)
    apart(tokens).sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, apart.embedding.weight.grad + apart.lm_head.weight.grad)
    due = model(tokens)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    plain = Tied()
    plain.load_state_dict(state)
    assert torch.equal(rt.qat.prepare(plain, {"*": "int8"})(tokens), due)
    assert torch.equal(rt.qat.convert(model)(tokens), due)
