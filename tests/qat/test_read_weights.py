"""Modules that read `weight` of a layer, and multiply themselves, get the rounded one: in training, evaluation, and converted."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.nn.reading import ReadWeight
from rooftile.qat.prepared.layers import Prepared
from rooftile.weights.two_four import Recipe
from tests.qat.models import FORMATS, inputs, mlp

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
WHISPER = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 32, "max_source_positions": 20,
    "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "dropout": 0.0,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PIXELS = {"image_size": 16, "patch_size": 8}


def ids(seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(seed))


class ReadsItsWeight(nn.Module):
    """Attention as in timm's BEiT: q, k and v of one layer, whose bias has no part for k."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))
        self.register_buffer("k_bias", torch.zeros(32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = nn.functional.linear(x, weight=self.qkv.weight, bias=bias).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(o.transpose(1, 2).flatten(2))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.net(source, target)


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model, and its inputs."""
    torch.manual_seed(0)
    if name == "beit of timm":
        return nn.Sequential(ReadsItsWeight(), ReadsItsWeight()), {"input": torch.randn(2, 5, 32)}
    if name == "nn.Transformer":
        return Both(), {"source": torch.randn(2, 5, 32), "target": torch.randn(2, 4, 32)}
    if name == "encoder layer":
        return nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)), {"input": torch.randn(2, 5, 32)}
    transformers = pytest.importorskip("transformers")
    pairs = {"decoder_input_ids": ids(1)}
    images = {"pixel_values": torch.randn(2, 3, 16, 16)}
    kinds: dict[str, tuple[str, str, dict[str, Any], dict[str, Tensor]]] = {
        "bert": ("BertModel", "BertConfig", {"vocab_size": 50} | SMALL | STILL, {"input_ids": ids()}),
        "albert": ("AlbertModel", "AlbertConfig", {"vocab_size": 50, "embedding_size": 32} | SMALL | STILL, {"input_ids": ids()}),
        "vit": ("ViTModel", "ViTConfig", PIXELS | SMALL | STILL, images),
        "beit": ("BeitModel", "BeitConfig", PIXELS | SMALL | STILL | {"drop_path_rate": 0.0}, images),
        "t5": ("T5ForConditionalGeneration", "T5Config", T5, {"input_ids": ids()} | pairs),
        "t5 gated": (
            "T5ForConditionalGeneration", "T5Config", T5 | {"feed_forward_proj": "gated-gelu"}, {"input_ids": ids()} | pairs,
        ),
        "whisper": (
            "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, {"input_features": torch.randn(2, 32, 40)} | pairs,
        ),
        "gpt2": (
            "GPT2LMHeadModel", "GPT2Config",
            {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 20, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
            {"input_ids": ids()},
        ),
        "mixtral": (
            "MixtralForCausalLM", "MixtralConfig", {"vocab_size": 50, "num_key_value_heads": 2, "num_local_experts": 4} | SMALL,
            {"input_ids": ids()},
        ),
    }  # fmt: skip
    model, config, settings, given = kinds[name]
    return getattr(transformers, model)(getattr(transformers, config)(**settings)), given


KINDS = (
    "bert", "albert", "vit", "beit", "t5", "t5 gated", "whisper", "gpt2", "mixtral", "beit of timm", "nn.Transformer",
    "encoder layer",
)  # fmt: skip


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def prepared(model: nn.Module, name: str, format: str = "int4:32", **options: Any) -> nn.Module:
    skip = ("proj_out",) if name == "whisper" else ("lm_head",)
    return rt.qat.prepare(model, format, skip=skip, **options)


def rounded_by_hand(plain: nn.Module, model: nn.Module) -> nn.Module:
    """A model whose weights are those that a prepared one's codes stand for."""
    found = copy.deepcopy(plain)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, Prepared):
                found.get_submodule(name).weight.copy_(layer.codes().dequantise())
            for attribute, tensor in vars(layer).get("qat_tensors", {}).items():
                rows = tensor.codes().dequantise()
                weight = found.get_submodule(name)._parameters[attribute]
                weight.copy_((rows.T if tensor.kind == "Conv1D" else rows).reshape(weight.shape))
    return found


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_says_what_it_says_with_weights_rounded_by_hand(name: str, training: bool) -> None:
    plain, given = made(name)
    model = prepared(copy.deepcopy(plain.train(training)), name)
    by_hand = rounded_by_hand(plain, model)
    due = first(by_hand(**given))
    # it matters
    assert (first(plain(**given)) - due).abs().max() > 1e-4
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(first(model(**given)).clone(), due.detach(), rtol=1e-5, atol=3e-6)
    converted = rt.qat.convert(copy.deepcopy(model))
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            torch.testing.assert_close(first(converted(**given)), due, rtol=1e-5, atol=3e-6)
    # gradients are those of the rounded numbers, and reach the parameters
    first(model(**given)).square().sum().backward()
    due.square().sum().backward()
    there = dict(by_hand.named_parameters())
    for parameter, p in model.named_parameters():
        if there[parameter].grad is not None:
            torch.testing.assert_close(p.grad, there[parameter].grad, rtol=1e-4, atol=1e-4, msg=parameter)


@pytest.mark.parametrize("format", ["int8", "fp8", "mxfp4"])
def test_who_multiplies_with_the_weight_gets_the_product_of_the_layer(format: str) -> None:
    """Formats round activations, too."""
    layer, x = rt.qat.prepare(mlp(), format)[0], inputs()
    y = layer(x)
    assert torch.equal(nn.functional.linear(x, layer.weight, layer.bias), y)
    converted = rt.qat.convert(rt.qat.prepare(mlp(), format))[0]
    assert torch.equal(nn.functional.linear(x, converted.weight, converted.bias), y)


@pytest.mark.parametrize("format", ["int8", "int4:32"])
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_fast_path_is_switched_off(format: str, compiled: bool) -> None:
    plain, given = made("encoder layer")
    plain.eval()
    encoder = nn.TransformerEncoder(plain[0], 2, enable_nested_tensor=True).eval()
    model, x = rt.qat.prepare(copy.deepcopy(encoder), format), given["input"]
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for each in (model, rt.qat.convert(copy.deepcopy(model))):
        calls: list[int] = []
        hook = each.layers[1].linear1.register_forward_hook(lambda *unused, calls=calls: calls.append(1))
        with torch.no_grad():
            due = each(x, src_key_padding_mask=padding)
            hook.remove()
            assert calls == [1]
            if compiled:
                again = torch.compile(each, backend="aot_eager", fullgraph=True)(x, src_key_padding_mask=padding)
                torch.testing.assert_close(again, due)
    switches = [layer.activation_relu_or_gelu for layer in model.layers]
    assert switches == [0, 0]
    rt.qat.restore(model)
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 1]
    assert model.use_nested_tensor == encoder.use_nested_tensor
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    with torch.no_grad():
        assert torch.equal(model(x), encoder(x))


class Foreign(torch.autograd.Function):
    """A product that PyTorch does not announce to classes of tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w.T,
    "mm": lambda x, w: torch.mm(x, w.t()),
    "einsum": lambda x, w: torch.einsum("bk,nk->bn", x, w),
    "addmm": lambda x, w: torch.addmm(torch.zeros(w.shape[0]), x, w.transpose(0, 1)),
    "cat": lambda x, w: nn.functional.linear(x, torch.cat([w[:9], w[9:]])),
    "function": Foreign.apply,
    "detour": lambda x, w: nn.functional.linear(x, w * 1.0),
    "half": lambda x, w: nn.functional.linear(x.double(), w.to(torch.float64)).float(),
}


@pytest.mark.parametrize("options", [{}, {"sparsity": Recipe()}, {"format": None, "sparsity": Recipe()}, {"estimator": "lsq"}])
@pytest.mark.parametrize("read", READS)
def test_any_function_of_the_weight_computes_with_the_rounded_one(read: str, options: dict[str, Any]) -> None:
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    models = [rt.qat.prepare(mlp(), **{"format": "int4:32"} | options) for _ in range(2)]
    y, due = READS[read](x, models[0][0].weight), models[1][0](x) - models[1][0].bias
    torch.testing.assert_close(y, due, rtol=1e-5, atol=2e-6)
    y.square().sum().backward()
    due.square().sum().backward()
    for name in ("parameter", "scales"):
        one, other = (getattr(model[0], name) for model in models)
        if other is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_the_numbers_are_those_of_the_codes(format: str) -> None:
    model = rt.qat.prepare(mlp(dtype=torch.bfloat16), format)
    due = model[0].codes().dequantise(torch.bfloat16)
    assert torch.equal(model[0].weight, due)
    converted = rt.qat.convert(copy.deepcopy(model))[0]
    assert torch.equal(converted.weight, due)
    for weight in (model[0].weight, converted.weight):
        assert isinstance(weight, Tensor)
        assert (weight.dtype, tuple(weight.shape), weight.device.type) == (torch.bfloat16, (256, 128), "cpu")
    with rt.qat.off(model):
        assert model[0].weight is model[0].parameter


def test_dtype_and_shape_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (rt.qat.prepare(mlp(), "int8"), rt.qat.convert(rt.qat.prepare(mlp(), "int8"))):
        asked: list[int] = []
        monkeypatch.setattr(type(model[0]), "numbers", lambda self, asked=asked: asked.append(1) or torch.zeros(256, 128))
        weight = model[0].weight
        assert (weight.dtype, weight.shape, weight.size(0), weight.dim(), weight.numel(), len(weight)) == (
            torch.float32, (256, 128), 256, 2, 256 * 128, 256,
        )  # fmt: skip
        assert not asked
        weight.sum()
        assert asked == [1]


def test_what_is_done_in_place_is_done_to_the_parameter() -> None:
    model = rt.qat.prepare(mlp(), "int4:32")
    layer = model[0]
    nn.init.orthogonal_(layer.weight)
    torch.testing.assert_close(layer.parameter.T @ layer.parameter, torch.eye(128), rtol=0, atol=1e-5)
    with torch.no_grad():
        layer.weight.mul_(2.0)
        layer.weight[3] = 7.0
        layer.weight.data[4].fill_(5.0)
        torch.add(layer.parameter, 1.0, out=layer.weight)
    assert (layer.parameter[3] == 8.0).all()
    assert (layer.parameter[4] == 6.0).all()
    assert layer.weight.requires_grad
    layer.weight.requires_grad_(False)
    assert not layer.parameter.requires_grad
    layer.weight.requires_grad = True
    model(inputs()).sum().backward()
    assert layer.weight.grad is layer.parameter.grad is not None
    layer.weight.grad = None
    assert layer.parameter.grad is None
    layer.weight.data = torch.ones(256, 128)
    assert (layer.parameter == 1.0).all()
    assert dict(model.named_parameters())["0.weight"] is layer.parameter


@contextmanager
def casting() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("context", [nullcontext, casting])
def test_compiled_and_transformed_readers(context: Callable[[], Any]) -> None:
    model, x = rt.qat.prepare(nn.Sequential(ReadsItsWeight()), "int4:32"), torch.randn(2, 5, 32)
    with context():
        due = model(x)
        again = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    # in bf16 compiled code rounds the numbers, and the layer's own product does not
    torch.testing.assert_close(again, due, **({} if context is nullcontext else {"rtol": 0.02, "atol": 0.01}))
    due.float().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    with context():
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found = grad(lambda p: functional_call(model, p, (x,)).float().sum())(parameters)
    for name, one in found.items():
        rtol = 1e-4 if context is nullcontext else 0.05
        torch.testing.assert_close(one, expected[name], rtol=rtol, atol=rtol * one.abs().max().item())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with context():
            assert torch.equal(other(x), due)
    assert isinstance(model[0].qkv.weight, ReadWeight)
    assert not isinstance(pickle.loads(pickle.dumps(model[0].qkv.weight)), ReadWeight)


def test_wrappers_that_put_tensors_where_the_parameter_was() -> None:
    model, plain, x = rt.qat.prepare(mlp(), "int4:32"), mlp(), inputs()
    for one in (model, plain):
        torch.manual_seed(0)
        nn.utils.spectral_norm(one[0])
        one.eval()[0](x)
    normed = rt.qat.prepare(nn.Sequential(nn.Linear(128, 256)), "int4:32")
    normed[0].weight.data.copy_(plain[0].weight)
    normed[0].bias.data.copy_(plain[0].bias)
    assert torch.equal(model[0](x), normed(x))
    for wrap in (nn.utils.parametrizations.weight_norm, nn.utils.weight_norm):
        sentence = r"^2.weight is computed from other parameters since the layer was prepared"
        with warnings.catch_warnings(action="ignore"), pytest.raises(InvalidInput, match=sentence):
            wrap(rt.qat.prepare(mlp(), "int8")[2])


def test_the_weight_of_a_converted_layer_cannot_be_changed() -> None:
    layer = rt.qat.convert(rt.qat.prepare(mlp(), "int8"))[0]
    for change in (lambda w: w.mul_(2.0), lambda w: w.data, lambda w: w.requires_grad_(True), nn.init.zeros_):
        with pytest.raises(InvalidInput, match=r"is codes, which cannot be changed.*rooftile.qat.dequantise\(model\)"):
            change(layer.weight)
    assert not layer.weight.detach().requires_grad
