"""Models of Transformers that never ask for an attention function are refused by name, wherever the name comes from."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers

import rooftile
from rooftile import Unsupported
from rooftile.integrations import transformers_refusal as refusal
from tests.integrations.small_models import DECODER, SMALL, TOKENS, VOCABULARY

pytestmark = pytest.mark.usefixtures("registered")
NEVER = r"{} never asks for an attention implementation: attn_implementation=\"rooftile\" would not run; use"

BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4, **TOKENS}


def bloom_config():
    return transformers.BloomConfig(**BLOOM)


def xglm_config():
    return transformers.XGLMConfig(
        vocab_size=VOCABULARY, d_model=32, num_layers=1, attention_heads=4, ffn_dim=48, max_position_embeddings=64, **TOKENS
    )


def git_config():
    # it looks the name up in a table of its own, and used to raise KeyError: 'rooftile'
    return transformers.GitConfig(**SMALL | TOKENS, vision_config=SMALL | {"image_size": 16, "patch_size": 8})


REFUSED = {"BloomForCausalLM": bloom_config, "XGLMForCausalLM": xglm_config, "GitForCausalLM": git_config}


@pytest.mark.parametrize("name", REFUSED)
def test_from_config(name):
    kind = getattr(transformers, name)
    for build in (transformers.AutoModelForCausalLM.from_config, kind._from_config):
        with pytest.raises(Unsupported, match=NEVER.format(name)):
            build(REFUSED[name](), attn_implementation="rooftile")
    config = REFUSED[name]()
    config._attn_implementation = "rooftile"
    with pytest.raises(Unsupported, match=NEVER.format(name)):
        kind(config)


def test_from_pretrained(tmp_path):
    transformers.BloomForCausalLM(bloom_config()).save_pretrained(tmp_path)
    for auto in (transformers.AutoModel, transformers.AutoModelForCausalLM, transformers.BloomForCausalLM):
        with pytest.raises(Unsupported, match=r"Bloom.* never asks"):
            auto.from_pretrained(tmp_path, attn_implementation="rooftile")
        auto.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["rooftile", "paged|rooftile"])
def test_set_attn_implementation(name):
    """Transformers itself would only warn, and leave the model as it was."""
    model = transformers.BloomForCausalLM(bloom_config())
    row = torch.arange(5)[None]
    due = model(row).logits
    for asked in (name, {"": name}):
        with pytest.raises(Unsupported, match="BloomForCausalLM never asks"):
            model.set_attn_implementation(asked)
    assert torch.equal(model(row).logits, due)


def test_after_enable():
    with rooftile.enabled(), pytest.raises(Unsupported, match="BloomModel never asks"):
        transformers.AutoModel.from_config(bloom_config(), attn_implementation="rooftile")


def llava_config():
    vision = transformers.Data2VecVisionConfig(
        **{k: SMALL[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
        image_size=16, patch_size=8,
    )  # fmt: skip
    return transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**DECODER))


def test_one_part_of_a_model():
    """A part that never asks is refused with the whole, and a dict gives each part its own."""
    with pytest.raises(Unsupported, match="Data2VecVisionModel never asks"):
        transformers.AutoModelForImageTextToText.from_config(llava_config(), attn_implementation="rooftile")
    parts = {"": "rooftile", "text_config": "rooftile", "vision_config": "eager"}
    model = transformers.AutoModelForImageTextToText.from_config(llava_config(), attn_implementation=parts)
    assert model.config.text_config._attn_implementation == "rooftile"
    with pytest.raises(Unsupported, match="Data2VecVisionModel never asks"):
        model.set_attn_implementation("rooftile")
    with pytest.raises(Unsupported, match="Data2VecVisionModel never asks"):
        model.set_attn_implementation(parts | {"vision_config": "rooftile"})
    model.set_attn_implementation(parts)
    before = rooftile.status().calls
    model(torch.arange(12, 20)[None])
    assert sum(rooftile.status().calls.values()) == sum(before.values()) + 2


class OwnAttention(transformers.LlamaPreTrainedModel):
    """A model of a user: its module has no attention, it makes a mask, and adds it to scores of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        mask = transformers.masking_utils.create_causal_mask(self.config, x, attention_mask, None)
        return torch.softmax(x @ x.mT + mask[:, 0], dim=-1) @ x


def test_the_first_forward_tells_what_no_source_says(monkeypatch):
    # a compiled attention in this process would end the search
    monkeypatch.setattr(refusal._Seen, "compiled", False)
    model = OwnAttention._from_config(transformers.LlamaConfig(**DECODER), attn_implementation="eager")
    row = torch.arange(7)[None]
    due = model(row)
    model.set_attn_implementation("rooftile")
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"OwnAttention made a mask for .* and never called its function"):
            model(row)
    # the mask itself is right all the same: it is a tensor of numbers as soon as the model adds it
    model._forward_hooks.clear()
    assert torch.equal(model(row), due)
    changed = row.clone()
    changed[:, -1] = 9
    assert torch.equal(model(changed)[:, :-1], due[:, :-1])


def test_a_model_that_asks_is_looked_at_once(monkeypatch):
    monkeypatch.setattr(refusal._Seen, "compiled", False)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**DECODER), attn_implementation="rooftile")
    assert len(model._forward_hooks) == len(model.model._forward_hooks) == 1
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for one in (model, twin):
        one(torch.arange(5)[None])
        assert not one.model._forward_hooks
    # a mask is made ahead of the forward here
    model.generate(torch.arange(5)[None], max_new_tokens=2, do_sample=False, cache_implementation="static", disable_compile=True)
