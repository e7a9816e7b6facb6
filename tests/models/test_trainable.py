"""The decoder to train: causal with every causal mixer, saved and loaded, and served where its layers are exact attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.fused.rope import rotate
from rooftile.models import Decoder, ModelConfig, TrainableDecoder
from rooftile.models.mixing_modules import MIXERS

VOCAB, T = 40, 32
SMALL = {
    "attention": {},
    "linear": {},
    "performer": {"m": 16},
    "linformer": {"length": T, "r": 8},
    "sparse_transformer": {"stride": 6, "pattern": "fixed", "summary": 2},
    "reformer": {"chunk": 6, "rounds": 2, "buckets": 4, "strict": True},
    "routing": {"clusters": 3, "strict": True},
    "native_sparse": {"block_size": 4, "length": 4, "stride": 2, "count": 4, "window": 5},
    "mamba": {"state_size": 6, "conv": 3, "rank": 3},
    "mamba2": {"head_dim": 8, "state_size": 6, "groups": 2},
    "delta": {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 8},
}


def small(mixers="attention", **sizes) -> TrainableDecoder:
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "layers": 2, "max_len": 64} | sizes
    return TrainableDecoder(VOCAB, mixers=mixers, **sizes)


def mixer(name: str) -> dict:
    return {"name": name, **SMALL[name]}


def texts(rows: int = 2, length: int = T) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model: TrainableDecoder, tokens: Tensor) -> Tensor:
    return model.eval()(tokens)


def test_every_mixer_is_tried() -> None:
    assert SMALL.keys() == MIXERS.keys()


@pytest.mark.parametrize("name", sorted(SMALL.keys() - {"linformer"}))
def test_a_later_token_changes_no_earlier_logits_and_its_own(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = small(mixer(name)), texts()
    edited = tokens.clone()
    edited[:, 20:] = (edited[:, 20:] + 1) % VOCAB
    before, after = logits(model, tokens), logits(model, edited)
    torch.testing.assert_close(after[:, :20], before[:, :20], atol=1e-5, rtol=1e-5)
    assert (after - before)[:, 20:].abs().amax(-1).min() > 1e-3
    # an earlier token reaches later logits through the mixer
    edited = tokens.clone()
    edited[:, 16] = (edited[:, 16] + 1) % VOCAB
    assert (logits(model, edited) - before)[:, 17:].abs().max() > 1e-4


def test_linformer_has_no_causal_form_and_earlier_logits_change() -> None:
    torch.manual_seed(0)
    model, tokens = small(mixer("linformer")), texts()
    edited = tokens.clone()
    edited[:, 20:] = (edited[:, 20:] + 1) % VOCAB
    assert (logits(model, edited) - logits(model, tokens))[:, :20].abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_parameter_has_a_gradient_and_a_place_matters(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = small(mixer(name)), texts()
    assert model.mixers_loss() is None
    cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    assert (model.mixers_loss() is not None) == (name == "routing")
    if not MIXERS[name].attends:
        return
    # the same weights without rotary positions have other logits
    plain = small(mixer(name))
    plain.load_state_dict(model.state_dict())
    for layer in plain.layers:
        layer.mixer.positions = None
    assert (logits(plain, tokens) - logits(model, tokens)).abs().max() > 1e-4


@pytest.mark.parametrize("name", sorted(SMALL))
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # a layer of another kind beside it
    model = small(["attention", mixer(name)])
    if name == "routing":
        # centroids have moved since they were drawn
        model(texts())
    model.save(tmp_path)
    loaded = TrainableDecoder.load(tmp_path)
    assert loaded.mixers == model.mixers
    assert loaded.parameter_count == model.parameter_count
    torch.testing.assert_close(logits(loaded, texts()), logits(model, texts()), atol=0, rtol=0)


@pytest.mark.parametrize("compression", ["exact attention", "mlp", "linear", "mean"])
def test_a_decoder_is_served_with_the_same_greedy_tokens(compression: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = small()
    if compression != "exact attention":
        model = small(["attention", mixer("native_sparse") | {"compression": compression}])
    model.save(tmp_path)
    tokens = texts(1, 12)
    for _ in range(8):
        tokens = torch.cat([tokens, logits(model, tokens)[:, -1:].argmax(-1)], 1)
    llm = rt.LLM(tmp_path, device="cpu")
    (found,) = llm.generate([tokens[0, :12].tolist()], rt.SamplingParams(temperature=0, max_tokens=8))
    assert list(found.outputs[0].token_ids) == tokens[0, 12:].tolist()


def test_the_inference_decoder_has_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, tokens = small(theta=500.0, ffn=48), texts(1)
    model.save(tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    assert ModelConfig.from_folder(tmp_path) == decoder.config
    assert decoder.config.rotary == model.config.rotary

    def attend(layer, q, k, v, rotation):
        q, k = (rotate(x, rotation) for x in (q, k))
        return rt.attention(q[None], k[None], v[None], rt.CAUSAL)[0]

    found = decoder.logits(decoder(tokens[0], torch.arange(T), attend))
    torch.testing.assert_close(found, logits(model, tokens)[0], atol=2e-5, rtol=2e-5)


def test_a_decoder_with_other_mixers_is_refused_by_the_engine(tmp_path: Path) -> None:
    small(["attention", mixer("reformer")]).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["RooftileForCausalLM"]
    with pytest.raises(InvalidInput, match=r"has layers that mix tokens by attention, reformer; served are attention, "):
        ModelConfig.from_folder(tmp_path)


def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    model, tokens = small(), texts(4)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mixers": "flash"}, "a mixer is 'flash'; must be a name, or a dictionary with a name, of attention, linear,"),
        ({"mixers": 3.5}, "mixers is 3.5; must be a mixer, or one for each layer"),
        ({"mixers": ["linear"]}, "mixers are 1; must be one for all layers, or one for each of 2"),
        ({"mixers": {"name": "linear", "mask": rt.FULL}}, "the mixer linear has the option mask, which the decoder decides"),
        ({"mixers": {"name": "linear", "feature": torch.relu}}, "must be a number, a string, a bool or None"),
        ({"mixers": {"name": "reformer", "buckets": 3}}, "buckets is 3; must be even"),
        ({"mixers": {"name": "linear", "stride": 3}}, "stride"),
        ({"heads": 5}, "hidden is 32 and heads is 5; a head must have an even number, hidden / heads"),
        ({"kv_heads": 3}, "heads is 4 and kv_heads 3; the second must divide the first"),
        ({"layers": 0}, "layers is 0; must be at least 1"),
    ],
)
def test_what_does_not_fit_is_a_sentence(arguments: dict, sentence: str) -> None:
    with pytest.raises((InvalidInput, TypeError), match=sentence.replace("(", r"\(")):
        small(**arguments)


def test_a_text_longer_than_its_positions_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="the text has 65 tokens; this model has positions for 64"):
        small()(texts(1, 65))


def test_a_folder_without_a_decoder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has no config.json; give a folder that TrainableDecoder.save wrote"):
        TrainableDecoder.load(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    with pytest.raises(InvalidInput, match=r"has no mixers; give a folder that TrainableDecoder.save wrote"):
        TrainableDecoder.load(tmp_path)


def test_packed_sequences_and_rotary_positions_do_not_go_together() -> None:
    layer = small(mixer("native_sparse")).layers[0].mixer
    with pytest.raises(InvalidInput, match="cu is given, and the model has rotary positions"):
        layer(torch.randn(10, 32), cu=torch.tensor([0, 4, 10], dtype=torch.int32))
