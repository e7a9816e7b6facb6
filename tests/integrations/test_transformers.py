"""Models of Transformers, tiny, with random weights: logits, gradients and tokens equal those of their eager attention."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

import rooftile
from rooftile.integrations import transformers as integration
from rooftile.integrations import transformers_packing
from tests.integrations.small_models import CAUSAL_MODELS, DECODER, SMALL, TOKENS, VOCABULARY, cache_word, recompute

pytestmark = pytest.mark.usefixtures("registered")


def build(config, auto=transformers.AutoModelForCausalLM):
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager")
    for name, p in model.named_parameters():
        # large enough that attention is far from uniform, also with sinks and windows
        torch.nn.init.normal_(p, std=0.3 if p.ndim > 1 or "sinks" in name else 0.05)
    return model.eval()


@pytest.fixture(scope="module", params=CAUSAL_MODELS)
def model(request):
    return build(CAUSAL_MODELS[request.param]())


def tokens(*shape):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model, implementation, real=None, **inputs):
    """Returns the logits of the real tokens, and every parameter's gradient through them."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**inputs).logits
    return with_gradients(model, logits if real is None else logits[real])


def with_gradients(model, logits):
    (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, due):
    torch.testing.assert_close(found[0], due[0], atol=1e-4, rtol=1e-4)
    assert found[1].keys() == due[1].keys()
    for name in due[1]:
        scale = due[1][name].abs().max().item()
        torch.testing.assert_close(found[1][name], due[1][name], atol=1e-5 + 1e-4 * scale, rtol=1e-3, msg=name)


def padding(side):
    there = torch.ones(3, 17, dtype=torch.long)
    if side == "left":
        there[0, :9] = 0
        there[2, :3] = 0
    elif side == "right":
        there[0, 8:] = 0
        there[2, 14:] = 0
    elif side == "holes":
        there[0, 5:9] = 0
        there[2, :2] = there[2, 10] = 0
    return there


def kinds(model, padded):
    return {"packed" if padded else "dense": model.config.num_hidden_layers}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_the_same_logits_and_gradients(model, ran, train):
    inputs = {"input_ids": tokens(2, 17)}
    model.train(train)
    due = logits_and_gradients(model, "eager", **inputs)
    assert not ran
    found = logits_and_gradients(model, "rooftile", **inputs)
    model.eval()
    assert ran == kinds(model, padded=False)
    assert_same(found, due)


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_padding_is_gathered_away(model, ran, side, cached):
    there = padding(side)
    positions = (there.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens(3, 17), "attention_mask": there, "position_ids": positions, "use_cache": cached}
    due = logits_and_gradients(model, "eager", there.bool(), **inputs)
    found = logits_and_gradients(model, "rooftile", there.bool(), **inputs)
    assert ran == kinds(model, padded=side != "none")
    assert_same(found, due)


def test_padding_between_tokens(model, ran):
    """Removing this padding would change distances, so windows and chunks are evaluated."""
    there = padding("holes")
    inputs = {"input_ids": tokens(3, 17), "attention_mask": there}
    due = logits_and_gradients(model, "eager", there.bool(), **inputs)
    assert_same(logits_and_gradients(model, "rooftile", there.bool(), **inputs), due)
    assert ran.total() == model.config.num_hidden_layers


def test_attention_runs_with_few_queries_where_padding_is(monkeypatch):
    """A packed call gets exactly the real tokens."""
    model = build(CAUSAL_MODELS["llama"]()).eval()
    model.set_attn_implementation("rooftile")
    rows = []
    packed = integration.api.attention_packed

    def look(q, k, *rest, **options):
        rows.append((len(q), len(k)))
        return packed(q, k, *rest, **options)

    monkeypatch.setattr(integration.api, "attention_packed", look)
    there = padding("right")
    model(tokens(3, 17), attention_mask=there)
    assert rows == [(int(there.sum()),) * 2] * 2


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def one_by_one(model, rows, lengths):
    """Returns the logits of each packed sequence by itself, with eager attention."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    parts = [row[None].split(list(n), dim=1) for row, n in zip(rows, lengths, strict=True)]
    logits = [torch.cat([model(part, use_cache=False).logits for part in row], dim=1) for row in parts]
    return with_gradients(model, torch.cat(logits))


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("lengths", [((5, 9, 3),), ((5, 9, 3), (12, 5))], ids=["one row", "two rows"])
def test_packed_position_ids_are_separate_sequences(model, ran, lengths, cached):
    """Also where eager attention lets them see each other: with a cache, and in GPT-OSS."""
    rows = tokens(len(lengths), 17)
    positions = torch.cat([positions_of(*n) for n in lengths])
    inputs = {"input_ids": rows, "position_ids": positions, "use_cache": cached}
    found = logits_and_gradients(model, "rooftile", **inputs)
    if model.config.model_type == "llama4_text":
        # its attention does not get position_ids, and its chunks continue across sequences, as in eager attention
        assert ran == ({"dense": 2} if cached else {"bias": 1, "packed": 1})
        assert_same(found, logits_and_gradients(model, "eager", **inputs))
    else:
        assert ran == {"packed": 2}
        assert_same(found, one_by_one(model, rows, lengths))


def test_offsets_given_by_the_collator(ran):
    model = build(CAUSAL_MODELS["llama"]())
    row = tokens(1, 17)
    offsets = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    model.set_attn_implementation("rooftile")
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    found = model(row, position_ids=positions_of(5, 9, 3), use_cache=True, **given).logits
    assert ran == {"packed": 2}
    model.set_attn_implementation("eager")
    due = torch.cat([model(part).logits for part in row.split([5, 9, 3], dim=1)], dim=1)
    torch.testing.assert_close(found, due, atol=1e-4, rtol=1e-4)


def generate(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    return model.generate(**inputs, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("side", ["none", "left"])
def test_the_same_tokens(model, ran, side):
    inputs = {"input_ids": tokens(3, 17), "attention_mask": padding(side)}
    due = generate(model, "eager", **inputs)
    assert torch.equal(generate(model, "rooftile", **inputs), due)
    # 12 tokens take a prefill and 11 steps
    assert ran.total() == 12 * model.config.num_hidden_layers


# generate() of transformers 5.17 cannot make chunked masks for a static cache; test_a_prompt_in_pieces has those
@pytest.mark.parametrize("model", [name for name in CAUSAL_MODELS if "chunks" not in name], indirect=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", ["none", "left"])
def test_the_same_tokens_with_a_static_cache(model, ran, side):
    """There are more keys than queries, and the last query is not at the last key."""
    inputs = {"input_ids": tokens(3, 17), "attention_mask": padding(side), "cache_implementation": "static"}
    due = generate(model, "eager", **inputs, disable_compile=True)
    assert torch.equal(generate(model, "rooftile", **inputs, disable_compile=True), due)
    assert ran.total() == 12 * model.config.num_hidden_layers


@pytest.mark.parametrize("cache", [transformers.DynamicCache, transformers.StaticCache])
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_in_pieces(model, ran, cache, padded):
    """1 < T < S, with a dynamic cache and with a static one that is longer than the written tokens."""
    row, there = tokens(2, 16), torch.ones(2, 16, dtype=torch.long)
    if padded:
        there[0, :3] = 0
    positions = (there.cumsum(1) - 1).clamp(min=0)

    def run(implementation):
        model.set_attn_implementation(implementation)
        past = cache(config=model.config, **({"max_cache_len": 24} if cache is transformers.StaticCache else {}))
        pieces = []
        for start, stop in ((0, 7), (7, 9), (9, 15), (15, 16)):
            seen = {"attention_mask": there[:, :stop], "position_ids": positions[:, start:stop]}
            with torch.no_grad():
                pieces.append(model(row[:, start:stop], use_cache=True, **{cache_word(model): past}, **seen).logits)
        return torch.cat(pieces, dim=1)[there.bool()]

    due = run("eager")
    torch.testing.assert_close(run("rooftile"), due, atol=1e-4, rtol=1e-4)
    assert ran.total() == 4 * model.config.num_hidden_layers


def test_a_mask_of_ones_own(model, ran):
    """A 4-D mask is complete: neither is_causal nor the window is added."""
    own = torch.rand(2, 1, 17, 17, generator=torch.Generator().manual_seed(2)) < 0.5
    own[..., range(17), range(17)] = True
    added = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    masks = {"sliding_attention": "added", "full_attention": "added", "chunked_attention": "added"}
    due = logits_and_gradients(model, "eager", input_ids=tokens(2, 17), attention_mask=_own(model, added, masks))
    for mine in (added, own):
        inputs = {"input_ids": tokens(2, 17), "attention_mask": _own(model, mine, masks)}
        assert_same(logits_and_gradients(model, "rooftile", **inputs), due)
    assert ran == {"bias": 2 * model.config.num_hidden_layers}


def _own(model, mask, kinds):
    types = getattr(model.config, "layer_types", None)
    return {kind: mask for kind in kinds if kind in types} if types else mask


ENCODERS = {
    "bert": lambda: (
        transformers.BertConfig(**SMALL, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
        transformers.AutoModelForMaskedLM,
        "packed",
    ),
    "modernbert (window)": lambda: (
        transformers.ModernBertConfig(
            **SMALL, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cls_token_id=1, sep_token_id=2,
        ),
        transformers.AutoModelForMaskedLM,
        "packed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(ran, name, side):
    config, auto, packed = ENCODERS[name]()
    model = build(config, auto)
    there = padding(side)
    inputs = {"input_ids": tokens(3, 17), "attention_mask": there}
    due = logits_and_gradients(model, "eager", there.bool(), **inputs)
    found = logits_and_gradients(model, "rooftile", there.bool(), **inputs)
    assert ran == {"dense" if side == "none" else packed: 2}
    assert_same(found, due)


def test_vit(ran):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    model = build(config, transformers.AutoModelForImageClassification)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    due = logits_and_gradients(model, "eager", **inputs)
    found = logits_and_gradients(model, "rooftile", **inputs)
    assert ran == {"dense": 2}
    assert_same(found, due)


@pytest.mark.parametrize("source", [9, 17], ids=["T != S", "T = S"])
def test_an_encoder_and_a_decoder(ran, source):
    """Cross-attention: the padding of the source's keys does not apply to the target's queries, at any length."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0,
        **TOKENS, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    model = build(config, transformers.AutoModelForSeq2SeqLM)
    there = padding("right")[:, :source]
    inputs = {"input_ids": tokens(3, source), "attention_mask": there, "decoder_input_ids": tokens(3, 17)}
    due = logits_and_gradients(model, "eager", **inputs)
    found = logits_and_gradients(model, "rooftile", **inputs)
    # the encoder's and the cross-attention without padded keys; the decoder's own has no padding
    assert ran == {"packed": 2, "dense": 1}
    assert_same(found, due)
    inputs.pop("decoder_input_ids")
    due = generate(model, "eager", **inputs)
    assert torch.equal(generate(model, "rooftile", **inputs), due)


def test_bert_with_cross_attention_keeps_every_query(ran):
    config = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    model = build(config, transformers.AutoModelForCausalLM)
    there = padding("right")
    inputs = {
        "input_ids": tokens(3, 17),
        "encoder_hidden_states": torch.randn(3, 17, 32),
        "encoder_attention_mask": there,
    }
    due = logits_and_gradients(model, "eager", **inputs)
    assert_same(logits_and_gradients(model, "rooftile", **inputs), due)
    assert ran == {"dense": 2, "packed": 2}


def test_dropout_is_on_in_training_only(ran):
    config = transformers.LlamaConfig(**DECODER, attention_dropout=0.5)
    model = build(config)
    model.set_attn_implementation("rooftile")
    row = tokens(2, 17)
    assert torch.equal(model(row).logits, model(row).logits)
    model.train()
    assert not torch.equal(model(row).logits, model(row).logits)
    torch.manual_seed(5)
    one = model(row).logits
    torch.manual_seed(5)
    assert torch.equal(model(row).logits, one)


def test_gradient_checkpointing(ran):
    model = build(CAUSAL_MODELS["llama"]())
    there = padding("left")
    inputs = {"input_ids": tokens(3, 17), "attention_mask": there, "use_cache": False}
    due = logits_and_gradients(model, "eager", there.bool(), **inputs)
    recompute(model)
    model.train()
    found = logits_and_gradients(model, "rooftile", there.bool(), **inputs)
    assert ran == {"packed": 4}
    assert_same(found, due)


def test_the_padding_is_found_once_per_forward(monkeypatch):
    model = build(CAUSAL_MODELS["llama"]())
    model.set_attn_implementation("rooftile")
    found = []
    packing_of = transformers_packing._packing_of
    monkeypatch.setattr(transformers_packing, "_packing_of", lambda *args: found.append(1) or packing_of(*args))
    model(tokens(3, 17), attention_mask=padding("left"))
    assert len(found) == 1
    model(tokens(1, 17), position_ids=positions_of(5, 9, 3), use_cache=True)
    assert len(found) == 2


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model(ran):
    model = build(CAUSAL_MODELS["llama"]())
    there = padding("left")
    positions = (there.cumsum(1) - 1).clamp(min=0)
    row, padded = tokens(3, 17), {"attention_mask": there, "position_ids": positions}
    with torch.no_grad():
        due = [model(row).logits, model(row, **padded).logits]
        model.set_attn_implementation("rooftile")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = [compiled(row).logits, compiled(row, **padded).logits]
    torch._dynamo.reset()
    torch.testing.assert_close(found[0], due[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1][there.bool()], due[1][there.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sdpa_implementation_under_enable(calls, name):
    """Models also reach Rooftile with attn_implementation="sdpa", after rooftile.enable()."""
    model = build(CAUSAL_MODELS[name]())
    inputs = {"input_ids": tokens(2, 17)}
    due = logits_and_gradients(model, "eager", **inputs)
    rooftile.enable()
    found = logits_and_gradients(model, "sdpa", **inputs)
    assert calls == {"forward": 2, "backward": 2}
    assert_same(found, due)


def python(program):
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


NAMES = "print('rooftile' in AttentionInterface(), 'rooftile' in AttentionMaskInterface())"
IMPORTS = "from transformers import AttentionInterface, AttentionMaskInterface"


@pytest.mark.parametrize("order", ["import rooftile; " + IMPORTS, IMPORTS + "; import rooftile"], ids=["before", "after"])
def test_importing_both_registers_the_name(order):
    assert python(f"{order}; {NAMES}") == ["True", "True"]


def test_importing_rooftile_does_not_import_transformers():
    program = "import rooftile, sys; rooftile.enable(); rooftile.disable(); print('transformers' in sys.modules)"
    assert python(program) == ["False"]


def test_after_disable_a_model_says_so():
    model = build(CAUSAL_MODELS["llama"]())
    model.set_attn_implementation("rooftile")
    rooftile.disable()
    with pytest.raises(rooftile.Unsupported, match=r"ran after rooftile\.disable\(\); call rooftile\.enable\(\), or model"):
        model(tokens(1, 5))
    with rooftile.enabled():
        due = model(tokens(1, 5)).logits
    with pytest.raises(rooftile.Unsupported, match=r"ran after rooftile\.disable"):
        model(tokens(1, 5))
    rooftile.enable()
    assert torch.equal(model(tokens(1, 5)).logits, due)
    rooftile.disable()


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("lengths", [(17,), (5, 9, 3)], ids=["one sequence", "three in a row"])
def test_under_inference_mode(model, lengths, cached):
    """The tensors of inference mode do not count their changes: positions that change in place must be seen."""
    model.set_attn_implementation("rooftile")
    positions = positions_of(*lengths)
    with torch.no_grad():
        due = model(tokens(1, 17), position_ids=positions, use_cache=cached).logits
        plain = model(tokens(1, 17), position_ids=positions_of(17), use_cache=cached).logits
    with torch.inference_mode():
        ids, mine = tokens(1, 17), positions.clone()
        assert torch.equal(model(ids, position_ids=mine, use_cache=cached).logits, due)
        mine.copy_(positions_of(17))
        assert torch.equal(model(ids, position_ids=mine, use_cache=cached).logits, plain)
    assert (len(lengths) == 1) == torch.equal(due, plain)
