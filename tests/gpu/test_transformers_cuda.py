"""A model of Transformers on CUDA: right with and without padding, and nothing waits for the GPU where nothing need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from rooftile.integrations import transformers as integration
from rooftile.integrations import transformers_mask, transformers_packing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    integration.register()
    integration.enable()
    yield
    integration.enable()


@pytest.fixture
def without_waiting() -> Iterator[None]:
    """Whatever waits for the GPU in the test's second half raises: call `begin` there."""

    def begin() -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


def model(**options):
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, sliding_window=40, bos_token_id=1, eos_token_id=None, pad_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().cuda()


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits_and_gradients(side):
    """At most twice as wrong as eager attention in bf16 is beside fp32."""
    there = torch.ones(3, 150, dtype=torch.long, device="cuda")
    if side != "none":
        there[0, slice(0, 70) if side == "left" else slice(70, None)] = 0
    rows = torch.randint(3, 64, (3, 150), device="cuda")

    def run(dtype, implementation):
        layers = model().to(dtype)
        layers.set_attn_implementation(implementation)
        logits = layers(rows, attention_mask=there).logits[there.bool()]
        logits.float().square().mean().backward()
        return [logits.detach(), *(p.grad for p in layers.parameters())]

    exact, plain, found = run(torch.float32, "eager"), run(torch.bfloat16, "eager"), run(torch.bfloat16, "rooftile")
    for e, p, x in zip(exact, plain, found, strict=True):
        ulp = torch.finfo(torch.bfloat16).eps * e.abs().max()
        assert (x.float() - e).abs().max() <= 2 * (p.float() - e).abs().max() + 8 * ulp


@pytest.mark.parametrize("static", [False, True], ids=["growing cache", "static cache"])
def test_the_same_tokens(static):
    layers = model()
    there = torch.ones(3, 50, dtype=torch.long, device="cuda")
    there[0, :20] = 0
    inputs = {"input_ids": torch.randint(3, 64, (3, 50), device="cuda"), "attention_mask": there}
    inputs |= {"cache_implementation": "static", "disable_compile": True} if static else {}
    tokens = []
    for implementation in ("eager", "rooftile"):
        layers.set_attn_implementation(implementation)
        tokens.append(layers.generate(**inputs, max_new_tokens=10, do_sample=False))
    assert torch.equal(*tokens)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_attention_waits_for_nothing(without_waiting):
    """No padding: never. Padding: only the first layer of a forward, which leaves what it found on the mask."""
    q, k, v = (torch.randn(2, 4, 50, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    there = torch.ones(2, 50, device="cuda", dtype=torch.bool)
    there[0, :20] = False
    masks = [
        transformers_mask.mask(batch_size=2, q_length=50, kv_length=50, attention_mask=seen, device="cuda")
        for seen in (None, there)
    ]
    module = torch.nn.Module()
    due = [integration.attention(module, q, k, v, mask)[0] for mask in masks]
    integration.attention(module, q[:, :, -1:], k, v, None)
    without_waiting()
    found = [integration.attention(module, q, k, v, mask)[0] for mask in masks]
    integration.attention(module, q[:, :, -1:], k, v, None)
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))
    assert not found[1][0, :20].any()


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=256, d_kv=64, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0,
        relative_attention_num_buckets=8, decoder_start_token_id=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval().cuda()


@pytest.mark.parametrize("named", [None, "triton", "hopper"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_learned_bias_with_padding(side, named, monkeypatch):
    """T5, gradients of its bias too: at most twice as wrong as eager attention in bf16 is beside fp32."""
    if named == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    attend = integration.api.attention
    monkeypatch.setattr(transformers_packing.api, "attention", lambda *args, **given: attend(*args, **given, backend=named))
    there = torch.ones(3, 150, dtype=torch.long, device="cuda")
    if side != "none":
        there[0, slice(0, 70) if side == "left" else slice(70, None)] = 0
    inputs = {"input_ids": torch.randint(3, 64, (3, 150), device="cuda"), "attention_mask": there}
    inputs["decoder_input_ids"] = torch.randint(3, 64, (3, 90), device="cuda")

    def run(dtype, implementation):
        layers = t5().to(dtype)
        layers.set_attn_implementation(implementation)
        logits = layers(**inputs).logits
        logits.float().square().mean().backward()
        return [logits.detach(), *(p.grad for p in layers.parameters())]

    exact, plain, found = run(torch.float32, "eager"), run(torch.bfloat16, "eager"), run(torch.bfloat16, "rooftile")
    for e, p, x in zip(exact, plain, found, strict=True):
        ulp = torch.finfo(torch.bfloat16).eps * e.abs().max()
        assert (x.float() - e).abs().max() <= 2 * (p.float() - e).abs().max() + 8 * ulp
