"""One place decides what a query sees: the mask function. Attention follows it, whatever a module or configuration says."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import masking_utils

import rooftile
from rooftile import Unsupported
from rooftile.integrations import transformers as integration
from rooftile.integrations import transformers_mask
from rooftile.integrations.transformers_lazy_mask import LazyMask
from tests.integrations.small_models import CAUSAL_MODELS, DECODER, HEADS
from tests.integrations.test_transformers import assert_same, build, logits_and_gradients, padding, tokens

pytestmark = pytest.mark.usefixtures("registered")


def t5gemma_config(window):
    part = transformers.T5GemmaModuleConfig(
        **DECODER, **HEADS, sliding_window=window, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8, attn_logit_softcapping=None,
    )  # fmt: skip
    return transformers.T5GemmaConfig(encoder=part.to_dict(), decoder=part.to_dict(), dropout_rate=0, vocab_size=64)


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("window", [2, 4, 7])
def test_windows_of_an_encoder_and_a_decoder(window, side):
    """An encoder's window does not count the query, a decoder's does; both have one number in their configuration."""
    model = build(t5gemma_config(window), transformers.AutoModelForSeq2SeqLM)
    inputs = {"input_ids": tokens(3, 17), "attention_mask": padding(side), "decoder_input_ids": tokens(3, 12)}
    assert_same(logits_and_gradients(model, "rooftile", **inputs), logits_and_gradients(model, "eager", **inputs))


def mask_for(T, **given):
    return transformers_mask.mask(batch_size=2, q_length=T, kv_length=T, **given)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_a_module_that_says_something_else(name, padded):
    """Neither is_causal nor the sliding window of module and call change what the mask function decided."""
    there = torch.ones(2, 7, dtype=torch.bool)
    there[0, 5:] = not padded
    given = {"mask_function": getattr(masking_utils, f"{name}_mask_function"), "attention_mask": there}
    mask = mask_for(7, **given)
    assert type(mask) is LazyMask
    q, k, v = (torch.randn(2, 2, 7, 8) for _ in range(3))
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask + 0).transpose(1, 2)
    module = torch.nn.Module()
    module.is_causal = name != "causal"
    module.config = transformers.MistralConfig(**DECODER, sliding_window=3)
    for call in ({}, {"is_causal": name != "causal"}, {"sliding_window": 3}):
        found, _ = integration.attention(module, q, k, v, mask, **call)
        torch.testing.assert_close(found[there], due[there])


def test_a_decoder_whose_modules_call_themselves_bidirectional():
    model = build(CAUSAL_MODELS["llama"]())
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    inputs = {"input_ids": tokens(2, 17)}
    assert_same(logits_and_gradients(model, "rooftile", **inputs), logits_and_gradients(model, "eager", **inputs))


def test_the_mask_in_the_hands_of_a_model():
    """Slices, sums, casts, copies and stacks see eager's numbers; shapes are known without them."""
    there = torch.ones(2, 7, dtype=torch.bool)
    there[0, :3] = False
    sizes = {"batch_size": 2, "q_length": 7, "kv_length": 7, "attention_mask": there, "dtype": torch.bfloat16}
    due = masking_utils.eager_mask(**sizes)
    made = []

    def mask():
        lazy = transformers_mask.mask(**sizes)
        dense = lazy.decision.dense
        lazy.decision = lazy.decision._replace(dense=lambda: made.append(1) or dense())
        return lazy

    lazy = mask()
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.ndim, lazy.dim(), len(lazy)) == (
        due.shape, due.dtype, due.device, 4, 4, 2,
    )  # fmt: skip
    assert (lazy.size(-1), lazy.requires_grad, lazy.is_cuda, lazy.is_floating_point()) == (7, False, False, True)
    assert type(lazy.to(torch.float32)) is type(lazy.to("cpu")) is type(lazy.detach()) is LazyMask
    assert not made
    operations = [
        lambda x: x + 1, lambda x: 1 + x, lambda x: x[:, :, 2:, :5], lambda x: x < 0, lambda x: x.to(torch.bool),
        lambda x: x.float() * 2, lambda x: x.to(torch.float32) - 1, lambda x: torch.cat([x, x], dim=-1), torch.clone,
        lambda x: x.repeat_interleave(2, dim=0), lambda x: x.expand(2, 3, 7, 7), lambda x: torch.stack((x, x + 1)),
        lambda x: torch.where(x == 0, 1.0, x), lambda x: x.tolist(), lambda x: torch.zeros(2, 1, 7, 7).add_(x), repr,
        lambda x: x.numpy(force=True) if x.dtype == torch.float32 else x.sum(),
    ]  # fmt: skip
    for n, operation in enumerate(operations):
        found, wanted = operation(mask()), operation(due)
        assert type(found) is type(wanted), n
        assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted, n
    assert len(made) >= len(operations)


def test_fewer_keys_than_the_mask_has():
    """Eager attention takes the mask's first columns."""
    mask = mask_for(9)
    q, k, v = (torch.randn(2, 2, n, 8) for n in (9, 6, 6))
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(mask + 0)[..., :6])
    torch.testing.assert_close(integration.attention(torch.nn.Module(), q, k, v, mask)[0], due.transpose(1, 2))


def test_without_a_mask_a_window_in_both_directions_is_refused():
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    with pytest.raises(Unsupported, match=r"sliding_window=3 came without a mask to attention that is not causal"):
        integration.attention(torch.nn.Module(), q, k, v, None, sliding_window=3, is_causal=False)
    found, _ = integration.attention(torch.nn.Module(), q, k, v, None, sliding_window=6, is_causal=False)
    torch.testing.assert_close(found, rooftile.attention(*(x.transpose(1, 2) for x in (q, k, v))))


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_take_the_mask_from_outside():
    """Each layer compiled by itself, with a mask that eager code made; one that slices the mask in its graph."""
    model = build(CAUSAL_MODELS["mistral (window)"]())
    inputs = {"input_ids": tokens(3, 17), "use_cache": False}
    model.set_attn_implementation("rooftile")
    with torch.no_grad():
        due = model(**inputs).logits
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
        counters = torch._dynamo.utils.counters
        counters.clear()
        for _ in range(3):
            torch.testing.assert_close(model(**inputs).logits, due)
        assert counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()

    def sliced(q, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, q[:, :, :5], q[:, :, :5], attn_mask=mask[..., :5])

    q, mask = torch.randn(2, 2, 7, 8), mask_for(7)
    compiled = torch.compile(sliced, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, mask), sliced(q, mask + 0))
    torch._dynamo.reset()


# later releases have another name for it
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_both_kinds(reentrant):
    model = build(CAUSAL_MODELS["mistral (window)"]())
    there = padding("left")
    inputs = {"input_ids": tokens(3, 17), "attention_mask": there, "use_cache": False}
    due = logits_and_gradients(model, "eager", there.bool(), **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    assert_same(logits_and_gradients(model, "rooftile", there.bool(), **inputs), due)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "mistral (window)"])
def test_tensors_without_values(name):
    """On meta, under a mode of fake tensors and in an exported program there is nothing to read."""
    model = build(CAUSAL_MODELS[name]())
    model.set_attn_implementation("rooftile")
    row = tokens(2, 9)
    exported = torch.export.export(model, (row,), kwargs={"use_cache": False}, strict=False)
    torch.testing.assert_close(exported.module()(row, use_cache=False).logits, model(row, use_cache=False).logits)
    assert model.to("meta")(row.to("meta")).logits.shape == (2, 9, 64)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = transformers.AutoModelForCausalLM.from_config(CAUSAL_MODELS[name](), attn_implementation="rooftile")
        assert fake(torch.zeros(2, 9, dtype=torch.long), use_cache=False).logits.shape == (2, 9, 64)
