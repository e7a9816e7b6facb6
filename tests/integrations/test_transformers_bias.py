"""position_bias of Transformers' models together with padding, packed rows and cross-attention, on every backend."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from transformers import masking_utils

from rooftile.exact import api
from rooftile.integrations import transformers as integration
from rooftile.integrations import transformers_mask, transformers_packing
from tests.integrations.small_models import VOCABULARY
from tests.integrations.test_transformers import assert_same, build, generate, logits_and_gradients, padding, tokens

pytestmark = pytest.mark.usefixtures("registered")
B, H, D = 3, 4, 8


@pytest.fixture(params=["eager", "tiled"])
def on_backend(request, monkeypatch):
    """Every call of attention names this backend, and none is made on packed rows. The sdpa backend takes no bias."""
    for module in (integration, transformers_packing):
        monkeypatch.setattr(module, "api", Named(request.param))


class Named:
    """`rooftile.exact.api` on one backend."""

    def __init__(self, backend):
        self.attention = partial(api.attention, backend=backend)


def exact(q, k, v, seen, bias, do):
    """Attention and its gradients by the formula, in fp64; rows that see nothing are 0."""
    q, k, v, bias = (x.detach().double().requires_grad_() for x in (q, k, v, bias))
    scores = q @ k.mT * D**-0.5 + bias
    scores = scores.masked_fill(~seen, float("-inf"))
    empty = ~seen.any(-1, keepdim=True)
    o = (torch.softmax(scores.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0) @ v).transpose(1, 2)
    return o, torch.autograd.grad(o, (q, k, v, bias), do.double())


def check(mask, seen, T, S, bias_shape, given=None, real=None):
    """Compares attention and all gradients with the formula, at real queries."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(B, H, n, D, requires_grad=True) for n in (T, S, S))
    bias = torch.randn(bias_shape, requires_grad=True)
    do = torch.randn(B, T, H, D)
    if real is not None:
        do = do * real[:, :, None, None]
    found, weights = integration.attention(torch.nn.Module(), q, k, v, mask, position_bias=bias, **(given or {}))
    assert weights is None
    due, due_grads = exact(q, k, v, seen, bias, do)
    keep = torch.ones(B, T, dtype=torch.bool) if real is None else real
    torch.testing.assert_close(found[keep], due[keep].float(), atol=2e-5, rtol=1e-4)
    assert not found[~keep].any()
    for x, y in zip(torch.autograd.grad(found, (q, k, v, bias), do), due_grads, strict=True):
        torch.testing.assert_close(x, y.float(), atol=5e-5, rtol=1e-4)


BIASES = {"shared": 1, "of each sequence": B}


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("batch", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bias_with_padding(causal, side, batch, heads):
    T = 17
    there = padding(side).bool()
    function = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    sizes = {"batch_size": B, "q_length": T, "kv_length": T, "mask_function": function}
    mask = transformers_mask.mask(**sizes, attention_mask=there)
    seen = masking_utils.sdpa_mask(**sizes, attention_mask=there, allow_is_causal_skip=False)
    check(mask, seen, T, T, (batch, heads, T, T), real=there if causal else None)


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("T", [1, 5, 17])
def test_bias_of_cross_attention(T):
    """The padding of the source's keys, any number of queries."""
    there = padding("holes").bool()
    sizes = {"batch_size": B, "q_length": T, "kv_length": 17, "mask_function": masking_utils.bidirectional_mask_function}
    mask = transformers_mask.mask(**sizes, attention_mask=there)
    check(mask, there[:, None, None].expand(B, 1, T, 17), T, 17, (1, H, T, 17))


@pytest.mark.usefixtures("on_backend")
def test_bias_of_a_prompt_in_a_static_cache():
    """The last query is not at the last slot."""
    there = torch.ones(B, 9, dtype=torch.bool)
    there[0, :3] = False
    sizes = {"batch_size": B, "q_length": 5, "kv_length": 12, "q_offset": 4}
    mask = transformers_mask.mask(**sizes, attention_mask=there)
    seen = masking_utils.sdpa_mask(**sizes, attention_mask=there, allow_is_causal_skip=False)
    check(mask, seen, 5, 12, (1, H, 5, 12))


def numbers(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("how", ["mask", "position_ids"])
def test_bias_of_packed_rows(how):
    T = 17
    row = torch.stack([numbers(5, 9, 3), numbers(17), numbers(1, 1, 15)])
    seen = (row[:, :, None] == row[:, None]).tril()[:, None]
    sizes = {"batch_size": B, "q_length": T, "kv_length": T}
    if how == "mask":
        packed = masking_utils.packed_sequence_mask_function(row)
        function = masking_utils.and_masks(masking_utils.causal_mask_function, packed)
        return check(transformers_mask.mask(**sizes, mask_function=function), seen, T, T, (1, H, T, T))
    starts = (row.diff(prepend=row[:, :1] - 1) != 0) * torch.arange(T)
    positions = torch.arange(T) - starts.cummax(1).values
    return check(transformers_mask.mask(**sizes), seen, T, T, (1, H, T, T), {"position_ids": positions})


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bias_of_given_offsets(causal, monkeypatch):
    """Queries and keys of other lengths, with the last query at the last key, and rows behind the last sequence."""
    monkeypatch.setitem(globals(), "B", 1)
    cu_q, cu_k = torch.tensor([0, 4, 9, 10]), torch.tensor([0, 6, 6, 9])
    seen = torch.zeros(1, 1, 12, 11, dtype=torch.bool)
    for n in range(3):
        (t, stop), (s, end) = cu_q[n : n + 2].tolist(), cu_k[n : n + 2].tolist()
        there = torch.ones(stop - t, end - s, dtype=torch.bool)
        seen[..., t:stop, s:end] = there.tril(end - s - stop + t) if causal else there
    given = {"cu_seq_lens_q": cu_q.int(), "cu_seq_lens_k": cu_k.int(), "is_causal": causal}
    check(None, seen, 12, 11, (1, H, 12, 11), given)


T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0,
    "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5", "SwitchTransformers", "LongT5"])
def test_models_that_learn_a_bias(name, side):
    """Logits, every parameter's gradient, that of the bias too, and the tokens of generate."""
    config = getattr(transformers, f"{name}Config")(**T5)
    model = build(config, transformers.AutoModelForSeq2SeqLM)
    there, targets = padding(side), padding("right")[:, :15]
    inputs = {"input_ids": tokens(3, 17), "attention_mask": there, "decoder_input_ids": tokens(3, 15)}
    inputs["decoder_attention_mask"] = targets
    due = logits_and_gradients(model, "eager", targets.bool(), **inputs)
    found = logits_and_gradients(model, "rooftile", targets.bool(), **inputs)
    assert any("relative_attention_bias" in grad and due[1][grad].abs().max() > 0 for grad in due[1])
    assert_same(found, due)
    if name == "T5":
        prompt = {"input_ids": tokens(3, 17), "attention_mask": there}
        assert torch.equal(generate(model, "rooftile", **prompt), generate(model, "eager", **prompt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    """The bias stays in float32, queries and keys do not."""
    model = build(transformers.T5Config(**T5), transformers.AutoModelForSeq2SeqLM)
    inputs = {"input_ids": tokens(3, 17), "attention_mask": padding("right"), "decoder_input_ids": tokens(3, 15)}
    found = {}
    for name in ("eager", "rooftile"):
        model.set_attn_implementation(name)
        with torch.autocast("cpu", dtype=dtype):
            found[name] = model(**inputs).logits
    torch.testing.assert_close(found["rooftile"], found["eager"], atol=0.02, rtol=0.05)


@pytest.mark.filterwarnings("ignore")
def test_compiled():
    model = build(transformers.T5Config(**T5), transformers.AutoModelForSeq2SeqLM)
    inputs = {"input_ids": tokens(3, 17), "attention_mask": padding("right"), "decoder_input_ids": tokens(3, 15)}
    with torch.no_grad():
        due = model(**inputs).logits
        model.set_attn_implementation("rooftile")
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
    torch._dynamo.reset()
    torch.testing.assert_close(found, due, atol=1e-4, rtol=1e-4)
