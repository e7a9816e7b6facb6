"""`rt.fuse` for each family: losses and gradients as without it, one instance changed and nothing else, and every seam."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rooftile as rt
from rooftile.fused import chunks
from tests.integrations.small_models import (
    CAUSAL_MODELS,
    DECODER,
    HEADS,
    SMALL,
    TOKENS,
    VOCABULARY,
    cache_word,
    recompute,
)

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "mistral": lambda: transformers.MistralForCausalLM(CAUSAL_MODELS["mistral (window)"]()),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, **HEADS, tie_word_embeddings=True)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **DECODER, **HEADS, sliding_window=5, attn_logit_softcapping=0.5, final_logit_softcapping=2.0, query_pre_attn_scalar=8
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(CAUSAL_MODELS["gpt2"]()),
}
# an RMS norm and a layer norm, with tied embeddings and without
TWO = ("llama", "gpt2")


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[name]()
    for parameter in model.parameters():
        # norms of ones and biases of zeros would hide an error
        nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).train()


def batch(rows: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


def step(model: nn.Module, **words) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**(batch() | words)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model: nn.Module, before: tuple, **words) -> None:
    loss, grads = step(model, **words)
    torch.testing.assert_close(loss, before[0], rtol=1e-5, atol=1e-6)
    assert grads.keys() == before[1].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, before[1][name], rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def state(model: nn.Module) -> dict[str, tuple[type, dict]]:
    """Everything that a module is: its class, and all of its attributes by identity."""
    return {
        name: (type(module), {key: (id(x), dict(x) if isinstance(x, dict) else x) for key, x in vars(module).items()})
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "rooftile"])
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_of_each_family(name: str, implementation: str, registered) -> None:
    model = made(name)
    if implementation == "sdpa" and not model._supports_sdpa:
        # Gemma 2 has a softcap, and so from Transformers 5.24 on no SDPA
        assert name == "gemma2"
        with pytest.raises(ValueError, match="does not support"):
            model.set_attn_implementation(implementation)
        return
    model.set_attn_implementation(implementation)
    before = step(model)
    report = rt.fuse(model)
    assert not report.kept
    assert sum(report.replaced.values()) >= 10
    assert_same_step(model, before)
    assert model(**batch()).logits is None


@pytest.mark.parametrize("name", FAMILIES)
def test_unfuse_restores_every_attribute(name: str) -> None:
    model, other = made(name), made(name)
    before, of_other, keys = state(model), state(other), {key: x.clone() for key, x in model.state_dict().items()}
    forwards = {type(module): type(module).forward for module in model.modules()}
    report = rt.fuse(model)
    assert {key: vars for key, (_, vars) in state(model).items()} == {key: vars for key, (_, vars) in before.items()}
    assert state(other) == of_other
    assert all(cls.forward is forward for cls, forward in forwards.items())
    found = model.state_dict()
    assert found.keys() == keys.keys()
    assert all(torch.equal(found[key], x) for key, x in keys.items())
    assert rt.unfuse(model) == sum(report.replaced.values())
    assert state(model) == before
    assert rt.unfuse(model) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_fp32_as_without(name: str) -> None:
    """The rule of two: losses and gradients in bf16, beside the same model in fp32."""
    exact, plain, fused = made(name), made(name, torch.bfloat16), made(name, torch.bfloat16)
    exact.load_state_dict(plain.state_dict())
    rt.fuse(fused, verbose=False)
    (loss, due), (_, usual), (found, grads) = step(exact), step(plain), step(fused)
    assert abs(found - loss) <= 0.02 * loss
    for key, grad in grads.items():
        error, allowed = ((x.float() - due[key]).abs().mean() for x in (grad, usual[key]))
        assert error <= 2 * allowed + 1e-3 * due[key].abs().mean(), key


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast(name: str) -> None:
    model = made(name)
    exact = step(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = step(model)
        rt.fuse(model, verbose=False)
        fused = step(model)
    assert fused[0].dtype == torch.float32
    for key, due in exact[1].items():
        error, allowed = ((x[1][key] - due).abs().mean() for x in (fused, plain))
        assert error <= 2 * allowed + 1e-3 * due.abs().mean(), key


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_and_logits_without_labels(name: str) -> None:
    model = made(name).eval()
    tokens = batch()["input_ids"]
    due, logits = model.generate(tokens, max_new_tokens=6, do_sample=False), model(tokens).logits
    rt.fuse(model, verbose=False)
    torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, logits[:, -2:], rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), due)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_under_either_name(name: str) -> None:
    """Transformers 5.24 says `cache` for `past_key_values`; every layer is fused before and since, and takes both."""
    model = made(name).eval()
    assert [why for why in rt.fuse(model, verbose=False).kept.values() if "takes" in why] == []
    word = cache_word(model)
    tokens = batch()["input_ids"][1:]
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits
        found = model(input_ids=tokens[:, :7], use_cache=True)
        rest = model(input_ids=tokens[:, 7:], use_cache=True, **{word: found[word]}).logits
        torch.testing.assert_close(torch.cat([found.logits, rest], 1), whole, rtol=1e-4, atol=1e-5)
        layer = next(module for module in model.modules() if type(module).__name__.endswith(("DecoderLayer", "Block")))
        x, angles = torch.randn(1, 5, layer_size(model)), {}
        if hasattr(model.base_model, "rotary_emb"):
            angles = {"position_embeddings": model.base_model.rotary_emb(x, torch.arange(5)[None])}
        held = [transformers.DynamicCache(config=model.config) for _ in range(2)]
        words = angles | {"attention_mask": None, "position_ids": torch.arange(5)[None]}
        same = [layer(x, **words, **{name: cache}) for name, cache in zip(("cache", "past_key_values"), held, strict=True)]
        assert torch.equal(*same)
        assert [cache.get_seq_length() for cache in held] == [5, 5]


def layer_size(model: nn.Module) -> int:
    return model.get_input_embeddings().weight.shape[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing(name: str) -> None:
    model = made(name)
    before = step(model)
    recompute(model)
    rt.fuse(model, verbose=False)
    assert_same_step(model, before, use_cache=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    model = made(name)
    words = {"attention_mask": None, "use_cache": False}
    before = step(model, **words)
    rt.fuse(model, verbose=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss = compiled(**(batch() | words)).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), before[0], rtol=1e-5, atol=1e-6)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[1][key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_pickles_and_folders(name: str, tmp_path) -> None:
    model = made(name)
    before = step(model)
    rt.fuse(model, verbose=False)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert_same_step(other, before)
        assert rt.unfuse(other) > 0
        assert_same_step(other, before)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert type(loaded) is type(FAMILIES[name]())
    assert loaded.config.architectures == [type(loaded).__name__]
    assert_same_step(loaded, before)


@pytest.mark.parametrize("name", TWO)
def test_transforms_and_inference_mode(name: str) -> None:
    model = made(name)
    words = {"attention_mask": None, "use_cache": False}
    before = step(model, **words)
    rt.fuse(model, verbose=False)
    weights = {key: x.detach() for key, x in model.named_parameters()}
    given = batch() | words
    found = torch.func.grad(lambda some: torch.func.functional_call(model, some, (), given).loss)(weights)
    for key, grad in before[1].items():
        torch.testing.assert_close(found[key], grad, rtol=1e-3, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(model(**given).loss, before[0], rtol=1e-5, atol=1e-6)


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer, as peft makes them."""

    def __init__(self, base: nn.Module, features: tuple[int, int]) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(features[0], 2, bias=False), nn.Linear(2, features[1], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(name: str, *, head: bool) -> nn.Module:
    """A model with an adapter around every projection, and all else frozen."""
    model = made(name).requires_grad_(False)
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if isinstance(child, kinds) and (head or key != "lm_head"):
                shape = child.weight.shape if isinstance(child, kinds[1]) else child.weight.shape[::-1]
                setattr(parent, key, Adapter(child, tuple(shape)))
    return model


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_around_linear_layers(name: str, head: bool) -> None:
    model = adapted(name, head=head)
    before = step(model)
    rt.fuse(model, verbose=False)
    assert_same_step(model, before)
    # the loss of a head with an adapter is that of its logits
    assert (model(**batch()).logits is None) is not head


def test_a_model_inside_of_another_module() -> None:
    wrapper = nn.Sequential(made("llama"))
    assert sum(rt.fuse(wrapper, verbose=False).replaced.values()) == 12
    assert sum(rt.fuse(made("llama").model, verbose=False).replaced.values()) == 11


@pytest.mark.parametrize("name", TWO)
def test_twice(name: str, capsys: pytest.CaptureFixture) -> None:
    model = made(name)
    before, classes = step(model), state(model)
    first = rt.fuse(model)
    assert "loss from hidden states" in capsys.readouterr().out
    second = rt.fuse(model, verbose=False)
    assert first == second
    assert not capsys.readouterr().out
    assert_same_step(model, before)
    rt.unfuse(model)
    assert state(model).keys() == classes.keys()
    assert all(type(module) is classes[key][0] for key, module in model.named_modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_with_labels(name: str) -> None:
    model = made(name)
    before, logits = step(model), model(**batch()).logits
    report = rt.fuse(model, logits=True, verbose=False)
    assert "loss from logits, which are kept" in report.replaced
    assert_same_step(model, before)
    torch.testing.assert_close(model(**batch()).logits, logits, rtol=1e-4, atol=1e-4)
    rt.fuse(model, verbose=False)
    assert model(**batch()).logits is None


@pytest.mark.parametrize("name", TWO)
def test_words_of_the_loss(name: str) -> None:
    model = made(name)
    labels = batch()["labels"]
    for words in (
        {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": labels.roll(-1, 1)},
        {"labels": torch.where(labels == 5, 1, labels).clamp(min=1), "ignore_index": 1},
    ):  # fmt: skip
        rt.unfuse(model)
        before = step(model, **words)
        rt.fuse(model, verbose=False)
        assert_same_step(model, before, **words)
    everything = {"output_hidden_states": True, "output_attentions": True}
    rt.unfuse(model)
    model.set_attn_implementation("eager")
    due = model(**batch(), **everything)
    rt.fuse(model, verbose=False)
    found = model(**batch(), **everything)
    for x, y in zip((*found.hidden_states, *found.attentions), (*due.hidden_states, *due.attentions), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    as_tuple = model(**batch(), return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], due.loss)
    # by position, in the order of the forward that was replaced
    place = {"llama": (None,) * 4, "gpt2": (None,) * 7}[name]
    torch.testing.assert_close(model(batch()["input_ids"], *place, batch()["labels"]).loss, due_without_mask(model))


def due_without_mask(model: nn.Module) -> torch.Tensor:
    return model(**(batch() | {"attention_mask": None})).loss


def test_a_loss_of_ones_own_and_hooks() -> None:
    model = made("llama")
    rt.fuse(model, verbose=False)
    model.loss_function = lambda logits, labels, **_: logits.float().mean()
    found = model(**batch())
    torch.testing.assert_close(found.loss, found.logits.mean())
    del model._loss_function
    seen: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: seen.append("head"))
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: seen.append("norm"))
    model(**batch())
    assert seen == ["norm", "head"]


def test_logits_are_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a step is as large as (tokens, vocabulary)."""
    config = transformers.LlamaConfig(**(SMALL | {"vocab_size": 4001} | TOKENS), num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).train()
    # the weights of the head have as many numbers as the logits of 32 rows
    tokens = torch.randint(2, 4001, (2, 64))
    monkeypatch.setattr(chunks, "BYTES_AT_ONCE", 8 * 4032 * 4)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, tuple | list) else [found]:
                largest = max(largest, x.numel() if isinstance(x, torch.Tensor) else 0)
            return found

    with Watch():
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert largest >= tokens.numel() * 4001
    rt.fuse(model, verbose=False)
    largest = 0
    with Watch():
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert largest == 32 * 4001


class Own(transformers.LlamaForCausalLM):
    """A user's class with a forward of its own."""

    def forward(self, *arguments, **words):
        return super().forward(*arguments, **words)


def test_what_is_not_fused_is_named(capsys: pytest.CaptureFixture) -> None:
    model = Own(transformers.LlamaConfig(**DECODER, hidden_act="tanh"))
    model.model.norm.forward = lambda x: x
    report = rt.fuse(model)
    assert report.kept["model"] == "Own overrides the forward of LlamaForCausalLM"
    assert report.kept["model.norm"].startswith("LlamaRMSNorm has a forward of its own on this instance")
    assert report.kept["model.layers.0.mlp"] == "activation Tanh; has gelu, gelu_new, gelu_pytorch_tanh, relu, silu"
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    assert "not fused model: Own overrides" in printed
    assert "model.layers.0.mlp and 1 more: activation Tanh" in printed


def test_a_patched_class_and_another_version_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def other(self, hidden_states):
        return hidden_states

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", other)
    model = made("llama")
    assert rt.fuse(model, verbose=False).kept["model.norm"] == f"the forward of LlamaRMSNorm was replaced by {__name__}"
    rt.unfuse(model)

    def newer(self, hidden_states, position_embeddings, another, **kwargs):
        return hidden_states

    newer.__module__ = modeling_llama.__name__
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", newer)
    sentence = rt.fuse(model, verbose=False).kept["model.layers.0.self_attn"]
    assert sentence.endswith("takes hidden_states, position_embeddings, another, kwargs")


def test_a_model_that_is_not_known() -> None:
    with pytest.raises(rt.InvalidInput, match=r"model is Linear, which has nothing that can be fused; must have .* or GPT-2"):
        rt.fuse(nn.Linear(3, 4))
    with pytest.raises(rt.InvalidInput, match=r"model is str; must be a torch.nn.Module"):
        rt.fuse("llama")
