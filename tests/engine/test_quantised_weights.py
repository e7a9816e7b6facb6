"""`LLM(weights=...)`: an engine says what a decoder says whose weights are replaced by those that the codes stand for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import rooftile as rt
from rooftile.engine import EngineConfig
from rooftile.fused import linear
from rooftile.fused.norm import normalise
from rooftile.models import Decoder
from rooftile.models.projection import InputFormat
from rooftile.runtime import devices
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.plan import check_device, plan_of, quantiser_of
from tests.engine.asking import GREEDY, ROOM, prompts, tokens_of
from tests.models.quantised import KINDS, PROJECTIONS, configure, plain, quantised

WEIGHT_ONLY = ("w8", "int4:32", "mxfp8", "mxfp4", "nvfp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    plain(made)
    return made


def dequantised(folder: Path, weights) -> Decoder:
    """A decoder with plain weights, which are those that the codes stand for."""
    decoder = Decoder.from_folder(folder)
    read = Decoder.from_folder(folder, weights=weights)
    for ours, other in zip(decoder.layers, read.layers, strict=True):
        for name in PROJECTIONS:
            ours.get_submodule(name).weight.copy_(other.get_submodule(name).dequantised())
    return decoder


@pytest.mark.parametrize("weights", [*WEIGHT_ONLY, {"*.mlp.*": "int4:32", "re:.*k_proj": "w8"}], ids=str)
def test_greedy_tokens_are_those_of_the_dequantised_model(weights, folder: Path) -> None:
    asked = prompts(16)
    llm = rt.LLM(folder, weights=weights, **ROOM)
    assert tokens_of(llm, asked, GREEDY) == tokens_of(rt.LLM(dequantised(folder, weights), **ROOM), asked, GREEDY)


@pytest.mark.parametrize("weights", ["fp8", "fp8_tile", "int8"])
def test_a_decoder_that_is_given_says_the_same(weights: str, folder: Path) -> None:
    asked = prompts(16)
    llm = rt.LLM(Decoder.from_folder(folder), weights=weights, **ROOM)
    assert llm.engine.runner.decoder.layers[0].o.parts[0].format == weights
    assert tokens_of(llm, asked, GREEDY) == tokens_of(rt.LLM(folder, weights=weights, **ROOM), asked, GREEDY)


@pytest.mark.parametrize("weights", ["int4:32", "fp8"])
def test_the_same_bits_in_every_batch(weights: str, folder: Path) -> None:
    llm = rt.LLM(folder, weights=weights, deterministic=True, **ROOM)
    params = rt.SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    asked = prompts(5)
    together = llm.generate(asked, params)
    for prompt, due in zip(asked, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert alone.outputs[0].token_ids == due.outputs[0].token_ids
        assert alone.outputs[0].logprobs == due.outputs[0].logprobs


def test_patterns_choose_modules(folder: Path) -> None:
    decoder = Decoder.from_folder(folder, weights={"layers.0.mlp.down_proj": "int4:64", "*.mlp.*": "w8", "*": "auto"})
    first, second = decoder.layers
    assert first.feed_forward.down.parts[0].group == 64
    assert second.feed_forward.down.parts[0].format == "w8"
    assert first.qkv.weight is not None
    assert isinstance(first.feed_forward.up.parts[0], QuantisedWeight)


def test_gpt2_keeps_its_weights_the_other_way_round(tmp_path: Path) -> None:
    from tests.models.checkpoints import assert_same, logits_of_ours, logits_of_theirs, saved, theirs
    from tests.models.checkpoints import prompts as some

    model = theirs("gpt2")
    saved(model, tmp_path)
    decoder = Decoder.from_folder(tmp_path, weights="mxfp8")
    for ours, other in zip(decoder.layers, model.transformer.h, strict=True):
        other.attn.c_attn.weight.data.copy_(ours.qkv.dequantised().T)
        other.attn.c_proj.weight.data.copy_(ours.o.dequantised().T)
        other.mlp.c_fc.weight.data.copy_(ours.feed_forward.up.dequantised().T)
        other.mlp.c_proj.weight.data.copy_(ours.feed_forward.down.dequantised().T)
    assert_same(logits_of_ours(decoder, some((9,))), logits_of_theirs(model, some((9,))))


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ("fp9", "weights is 'fp9'; must be one of auto, fp8"),
        (4, 'weights is 4; must be "auto", a format, or a dictionary'),
        ({}, r"weights is \{\}; must be \{pattern: format\}"),
        ({"*": "int3"}, "weights is 'int3'"),
        ({"re:(": "w8"}, r"the pattern 're:\(', which is no regular expression"),
        ("int4:x", "format is 'int4:x'; after the colon must be a group's size"),
    ],
)
def test_words_are_checked_at_once(weights, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence):
        EngineConfig(weights=weights)


def test_weights_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    for weights, sentence in (
        ("int4", "layers.0.self_attn.q_proj.weight cannot be quantised to int4: .* K = 64 numbers"),
        ({"*.experts.*": "w8"}, r"the pattern '\*.experts.\*', which matches no module; modules are such as layers.0"),
    ):
        with pytest.raises(rt.InvalidInput, match=sentence):
            rt.LLM(folder, weights=weights, **ROOM)
    quantised("gptq", tmp_path)
    with pytest.raises(rt.InvalidInput, match=r"weights is 'fp8' and the checkpoint .* is quantised already \(gptq\); leave"):
        rt.LLM(tmp_path, weights="fp8", **ROOM)
    decoder = Decoder.from_folder(tmp_path)
    with pytest.raises(rt.InvalidInput, match="the decoder's weights are quantised already; leave weights out"):
        rt.LLM(decoder, weights="fp8", **ROOM)


def test_a_scheme_for_the_cache_changes_no_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised("ct int4", tmp_path)
    due = tokens_of(rt.LLM(tmp_path, **ROOM), prompts(4), GREEDY)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    configure(tmp_path, quantization_config=KINDS["ct int4"][0] | {"kv_cache_scheme": scheme})
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {f"model.layers.{n}.self_attn.{x}_scale": torch.tensor([0.01]) for n in range(2) for x in "kv"}
    save_file(tensors | scales, tmp_path / "model.safetensors")
    llm = rt.LLM(tmp_path, **ROOM)
    assert llm.engine.runner.pages.storage.dtype == torch.float32
    assert tokens_of(llm, prompts(4), GREEDY) == due
    assert [line.split(": ")[1] for line in caplog.messages] == ["its kv_cache_scheme is not used"]


FP8_KINDS = [kind for kind in KINDS if "fp8" in kind and "mx" not in kind] + ["modelopt"]


@pytest.mark.parametrize("kind", [None, *FP8_KINDS])
def test_fp8_on_a_gpu_without_it_is_refused_before_anything_is_loaded(
    kind: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setitem(devices._KNOWN, torch.device("cuda", 0), "sm86")
    for name in ("rooftile.engine.start.loading.start_compiling", "rooftile.models.checkpoints.weights.stored_in"):
        monkeypatch.setattr(name, lambda *arguments, name=name: pytest.fail(f"{name} was called"))
    if kind is not None:
        quantised(kind, tmp_path)
    sentence = (
        r"weights in fp8(_tile)? need FP8 products, and cuda:0 has compute capability 8\.6; needs 8\.9 \(Ada\): give the 16-bit "
        r'checkpoint and weights="w8" or "int4", which multiply in 16 bits'
    )
    for weights in ("fp8", "fp8_tile", {"*.mlp.*": "w8", "*.o_proj": "fp8"}) if kind is None else ("auto",):
        with pytest.raises(rt.Unsupported, match=sentence):
            rt.LLM(folder if kind is None else tmp_path, weights=weights, device="cuda", **ROOM)
        with pytest.raises(rt.Unsupported, match=sentence):
            Decoder.from_folder(folder if kind is None else tmp_path, weights=weights, device="cuda:0")


def test_what_a_gpu_multiplies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    monkeypatch.setitem(devices._KNOWN, torch.device("cuda", 0), "sm80")
    for word in ("w8", "int8", "int4:64", "mxfp8", "mxfp4", "nvfp4", "2:4", {"*": "auto"}):
        check_device(quantiser_of(word), device)
    check_device(quantiser_of("fp8"), torch.device("cpu"))
    for kind in ("ct int4", "ct int8", "ct mxfp8", "gptq", "gptq, 8 bits", "awq", "torchao int8"):
        quantised(kind, tmp_path / kind)
        check_device(plan_of("auto", tmp_path / kind), device)
    monkeypatch.setitem(devices._KNOWN, torch.device("cuda", 0), "sm89")
    check_device(quantiser_of({"*": "fp8", "*.o_proj": "fp8_tile"}), device)


class Seen(TorchDispatchMode):
    """Counts the operators of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        name = operator._schema.name
        self.names[name.removeprefix("rooftile::")] += 1
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_at_most_one_kernel_a_layer_does_nothing_but_quantise(weights: str, folder: Path, monkeypatch) -> None:
    """Norms and gates write what the next product reads, with the bits of those that leave it to the product."""
    decoder = Decoder.from_folder(folder, weights=weights)
    tokens, positions = torch.arange(5), torch.arange(5)
    layers = len(decoder.layers)

    def attend(layer, q, k, v, rotation, gates=None):
        return q

    with torch.no_grad(), Seen() as seen:
        found = decoder(tokens, positions, attend)
    # the first norm, and that after attention and after the feed-forward; the last norm feeds the head
    assert seen.names["normalise_quantised"] == 1
    assert seen.names["add_norm_quantised"] == 2 * layers - 1
    assert seen.names["add_norm"] == 1
    assert seen.names["gate_quantised"] == layers
    # only what attention returns is quantised by the product that reads it
    assert seen.names["linear_quantised"] == 4 * layers
    assert seen.names["quantise_rows"] == 0
    # where nothing is quantised early, the numbers are the same
    monkeypatch.setattr("rooftile.models.projection.Projection.rows", lambda self, x: InputFormat())
    with torch.no_grad():
        assert torch.equal(decoder(tokens, positions, attend), found)


@pytest.mark.parametrize("weights", ["auto", "w8", "fp8"])
def test_an_addition_is_one_kernel_with_the_norm_after_it(weights: str, folder: Path, monkeypatch) -> None:
    """Also that after the feed-forward, with the next layer's norm; apart, the numbers are the same, bit for bit."""
    decoder = Decoder.from_folder(folder, weights=weights)
    tokens, positions = torch.arange(5), torch.arange(5)

    def attend(layer, q, k, v, rotation, gates=None):
        return q

    with torch.no_grad(), Seen() as seen:
        found = decoder(tokens, positions, attend)
    assert seen.names["normalise"] + seen.names["normalise_quantised"] == 1
    assert seen.names["add_norm"] + seen.names["add_norm_quantised"] == 2 * len(decoder.layers)
    assert seen.names["aten::add"] == 0

    def apart(x, stream, norm, post=None, out=None, scale=None):
        stream = stream + (x if post is None else normalise(x, post))
        return normalise(stream, norm, out, scale), stream

    monkeypatch.setattr("rooftile.models.decoder.add_norm", apart)
    with torch.no_grad(), Seen() as seen:
        assert torch.equal(decoder(tokens, positions, attend), found)
    assert seen.names["aten::add"] == 2 * len(decoder.layers)


@pytest.mark.parametrize("weights", ["w8", "int4:32"])
def test_a_gate_leaves_its_product_where_one_kernel_makes_both(weights: str, folder: Path, monkeypatch) -> None:
    decoder = Decoder.from_folder(folder, weights=weights)
    tokens, positions = torch.arange(5), torch.arange(5)

    def attend(layer, q, k, v, rotation, gates=None):
        return q

    def counted(multiply) -> tuple[torch.Tensor, Counter]:
        with torch.no_grad(), Seen() as seen:
            return decoder(tokens, positions, attend, *multiply), seen.names

    due, names = counted(())
    assert (names["linear_gated"], names["gated"]) == (0, len(decoder.layers)), "no kernel for it on a CPU"
    monkeypatch.setattr("rooftile.models.projection.takes_gates", lambda x, weight, bias: True)
    found, names = counted(())
    assert (names["linear_gated"], names["gated"]) == (len(decoder.layers), 0)
    assert torch.equal(found, due)
    # the batch-invariant product has an order of its own
    _, names = counted((linear,))
    assert names["linear_gated"] == 0


@pytest.mark.parametrize("word", ["fp8", "int8"])
def test_a_gate_that_leaves_in_codes_stays_by_itself(word: str, folder: Path, monkeypatch) -> None:
    """The scale of a row needs the whole row."""
    monkeypatch.setattr("rooftile.models.projection.takes_gates", lambda x, weight, bias: True)
    decoder = Decoder.from_folder(folder, weights={"*.gate_proj": "w8", "*.up_proj": "w8", "*.down_proj": word})
    with torch.no_grad(), Seen() as seen:
        decoder(torch.arange(5), torch.arange(5), lambda layer, q, *others: q)
    assert seen.names["linear_gated"] == 0
    assert seen.names["gate_quantised"] == len(decoder.layers)


def test_a_gate_leaves_in_codes_where_their_scale_is_known(tmp_path: Path, monkeypatch) -> None:
    """A checkpoint with static scales: one kernel multiplies, gates and quantises."""
    quantised("fp8, one scale", tmp_path)
    decoder = Decoder.from_folder(tmp_path)

    def counted() -> tuple[torch.Tensor, Counter]:
        with torch.no_grad(), Seen() as seen:
            return decoder(torch.arange(5), torch.arange(5), lambda layer, q, *others: q), seen.names

    due, names = counted()
    assert (names["linear_gated_rows"], names["gate_quantised"]) == (0, len(decoder.layers)), "no kernel for it on a CPU"
    monkeypatch.setattr("rooftile.models.projection.takes_rows", lambda x, weight, bias: True)
    found, names = counted()
    assert (names["linear_gated_rows"], names["gate_quantised"]) == (len(decoder.layers), 0)
    assert torch.equal(found, due)
    # a scale that is found at run time needs the whole row
    for layer in decoder.layers:
        layer.feed_forward.down.parts = tuple(replace(part, input_scale=None) for part in layer.feed_forward.down.parts)
    _, names = counted()
    assert (names["linear_gated_rows"], names["gate_quantised"]) == (0, len(decoder.layers))


def test_who_asks_for_codes(folder: Path) -> None:
    x = torch.zeros(1, 64)
    mixed = Decoder.from_folder(folder, weights={"re:.*q_proj": "fp8", "re:.*k_proj": "int8", "re:.*v_proj": "fp8"})
    layer = mixed.layers[0]
    assert layer.qkv.rows(x) == layer.feed_forward.up.rows(x) == InputFormat()
    of_bits = Decoder.from_folder(folder, weights="w8").layers[0]
    assert of_bits.qkv.rows(x) == InputFormat()
    codes = Decoder.from_folder(folder, weights="int8").layers[0]
    assert codes.qkv.rows(x) == InputFormat("int8")
    assert codes.qkv.rows(x.requires_grad_()) == InputFormat()


@pytest.mark.parametrize("word", ["int4:32", "w8"])
def test_scales_have_the_models_dtype_where_that_is_exact(word: str, folder: Path) -> None:
    """Hopper's kernels multiply fp16 by scales in fp16; `quantise_weight` gives scales of 8 bits, which fp16 has in its range."""
    kept = Decoder.from_folder(folder, dtype=torch.bfloat16, weights=word)
    cast = Decoder.from_folder(folder, dtype=torch.float16, weights=word)
    for layer, other in zip(kept.layers, cast.layers, strict=True):
        (part,), (same,) = layer.feed_forward.down.parts, other.feed_forward.down.parts
        assert (part.scales.dtype, same.scales.dtype) == (torch.bfloat16, torch.float16)
        assert torch.equal(same.dequantise(torch.float16), part.dequantise(torch.float16))
    # fp16 has no such small number, so these stay as they are
    small = rt.QuantisedWeight(
        part.codes, part.scales * 2.0**-40, part.zeros, None, part.format, part.group, part.shape
    )  # fmt: skip
    other.feed_forward.down.fill([small])
    assert other.feed_forward.down.parts[0].scales.dtype == torch.bfloat16
