"""Masks of Transformers in the forms that they take here, and the refused ones."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import masking_utils

import rooftile
from rooftile import InvalidInput, Unsupported
from rooftile.integrations import transformers as integration
from rooftile.integrations import transformers_mask
from rooftile.integrations.transformers_lazy_mask import LazyMask
from tests.integrations.small_models import CAUSAL_MODELS, DECODER, EXPERTS, HEADS

pytestmark = pytest.mark.usefixtures("registered")


def test_a_pattern_that_is_not_recognised_is_evaluated(ran):
    """Tokens of one image see each other in a causal model: the flash path of Transformers would drop that."""
    config = CAUSAL_MODELS["llama"]()
    images = torch.full((2, 17), -1)
    images[0, 4:9] = 0
    images[1, 10:13] = 1
    embeddings = torch.randn(2, 17, 32)
    made = {}
    for name in ("eager", "rooftile"):
        config._attn_implementation = name
        made[name] = masking_utils.create_causal_mask(config, embeddings, None, None, block_sequence_ids=images)
    assert torch.equal(made["rooftile"], made["eager"])
    assert made["rooftile"].shape == (2, 1, 17, 17)

    q, k, v = (torch.randn(2, 4, 17, 8) for _ in range(3))
    module = torch.nn.Module()
    module.config = config
    found, _ = integration.attention(module, q, k, v, made["rooftile"])
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=made["eager"])
    torch.testing.assert_close(found, due.transpose(1, 2))
    assert ran == {"bias": 1}


PATTERNS = {
    "causal": (masking_utils.causal_mask_function, {}),
    "window": (masking_utils.sliding_window_causal_mask_function(4), {"sliding_window": 4}),
    "chunks": (masking_utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.int64)), {}),
    "full": (masking_utils.bidirectional_mask_function, {"is_causal": False}),
    "window both ways": (
        masking_utils.sliding_window_bidirectional_mask_function(3),
        {"sliding_window": 4, "is_causal": False},
    ),
    "custom": (lambda b, h, i, j: (j <= i) & ((i - j) % 2 == 0), {}),
}


@pytest.mark.parametrize("seen", ["all", "padded left", "padded right", "holes"])
@pytest.mark.parametrize(
    ("T", "S", "q_offset", "kv_offset"),
    [
        (9, 9, 0, 0),
        (3, 9, 6, 0),
        (9, 14, 0, 0),
        (3, 14, 6, 0),
        (1, 9, 8, 0),
        (1, 14, 8, 0),
        (3, 6, 6, 3),
        (3, 6, 6, 0),
        (9, 12, 0, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PATTERNS)
def test_masks_say_what_transformers_own_say(ran, name, T, S, q_offset, kv_offset, seen):
    """In every form of a mask, attention equals that under the dense mask, for the real tokens."""
    function, given = PATTERNS[name]
    config = transformers.Llama4TextConfig(
        **DECODER, **HEADS, **EXPERTS, attention_chunk_size=5, layer_types=["chunked_attention", "full_attention"]
    )
    there = torch.ones(2, q_offset + T, dtype=torch.bool)
    if seen != "all":
        there[0, {"padded left": slice(0, 4), "padded right": slice(-2, None), "holes": slice(2, 4)}[seen]] = False
    if name == "chunks" and seen == "padded left":
        function = masking_utils.chunked_causal_mask_function(5, torch.tensor([4, 0]))
    sizes = {"batch_size": 2, "q_length": T, "kv_length": S, "q_offset": q_offset, "kv_offset": kv_offset}
    sizes |= {"mask_function": function, "attention_mask": None if seen == "all" else there, "config": config}
    due_mask = masking_utils.eager_mask(**sizes)
    mine = transformers_mask.mask(**sizes)

    q, k, v = (torch.randn(2, 2, n, 8) for n in (T, S, S))
    module = torch.nn.Module()
    module.config, module.layer_idx = config, 0 if name == "chunks" else 1
    found = integration.attention(module, q, k, v, mine, **({"sliding_window": None} | given))[0].transpose(1, 2)
    assert ran.total() == 1
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=due_mask)
    real = there[:, q_offset:] & (due_mask[:, 0] == 0).any(-1)
    torch.testing.assert_close(found.transpose(1, 2)[real], due.transpose(1, 2)[real])


def test_what_a_mask_decides():
    """A pattern without padding, sequences with it, numbers at once where neither is certain; and always eager's numbers."""
    causal, sizes = rooftile.CAUSAL, {"batch_size": 2, "q_length": 9, "kv_length": 9}
    window = sizes | {"mask_function": PATTERNS["window"][0]}
    there = torch.ones(2, 9, dtype=torch.bool)
    holes = there.clone()
    holes[0, 3:5] = False

    def decided(given):
        mask = transformers_mask.mask(**given)
        assert torch.equal(mask + 0, masking_utils.eager_mask(**given))
        return mask.decision if type(mask) is LazyMask else None

    assert decided(window)[:3] == (causal & rooftile.Window(3), None, False)
    assert decided(window | {"attention_mask": there})[:3] == (causal & rooftile.Window(3), None, False)
    assert decided(window | {"attention_mask": holes}) is None
    there[0, :4] = False
    assert decided(window | {"attention_mask": there}).sequences.tolist() == [[0] * 4 + [1] * 5, [2] * 9]
    static = window | {"kv_length": 11}
    assert decided(static | {"attention_mask": there}).sequences[1].tolist() == [2] * 9 + [-1] * 2
    assert decided(static).sequences[0].tolist() == [1] * 9 + [-1] * 2
    full = sizes | {"mask_function": masking_utils.bidirectional_mask_function, "attention_mask": there}
    assert (decided(full).pattern, decided(full).of_keys_only) == (rooftile.FULL, True)
    assert decided(full | {"mask_function": PATTERNS["custom"][0]}) is None


def attend(**given):
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    return integration.attention(torch.nn.Module(), q, k, v, given.pop("attention_mask", None), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_attentions": True}, "weights are never stored"),
        ({"head_mask": torch.ones(2)}, "head_mask is not for attn_implementation"),
        ({"indices": torch.ones(2)}, "sparse attention by indices"),
        ({"cache": object()}, "continuous batching"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_expressed_is_refused(given, message):
    with pytest.raises(Unsupported, match=message):
        attend(**given)


def test_a_window_of_unknown_layers_is_refused():
    module = torch.nn.Module()
    module.config = transformers.MistralConfig(**DECODER, sliding_window=3)
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    with pytest.raises(Unsupported, match=r"config\.sliding_window is 3"):
        integration.attention(module, q, k, v, None)
    integration.attention(module, q, k, v, None, sliding_window=3)


@pytest.mark.parametrize(
    ("attention_mask", "message"),
    [
        (torch.ones(2, 6), "must have 4 axes, .B, 1 or H, T, S.; use"),
        (torch.ones(2, 6, dtype=torch.long), "must have 4 axes"),
        (torch.ones(2, 6, dtype=torch.bool), "must have 4 axes"),
        (torch.ones(2, 1, 6), "must have 4 axes"),
    ],
    ids=["float", "int64", "bool", "three axes"],
)
def test_masks_that_mean_nothing_are_refused(attention_mask, message):
    with pytest.raises(InvalidInput, match=message):
        attend(attention_mask=attention_mask)


def test_position_bias():
    bias = torch.randn(1, 2, 6, 6)
    there = torch.ones(2, 6, dtype=torch.bool)
    there[0, 4:] = False
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    module = torch.nn.Module()
    hidden = torch.zeros(2, 1, 1, 6).masked_fill(~there[:, None, None], float("-inf"))
    found = integration.attention(module, q, k, v, hidden.expand(-1, -1, 6, -1), position_bias=bias)[0]
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias + hidden)
    torch.testing.assert_close(found.transpose(1, 2), due)
    found = integration.attention(module, q, k, v, None, position_bias=bias, is_causal=True)[0]
    causal = torch.ones(6, 6).tril().log()
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias + causal)
    torch.testing.assert_close(found.transpose(1, 2), due)


def test_patterns_by_the_functions_that_transformers_composes():
    recognise = transformers_mask._recognise
    assert recognise(masking_utils.causal_mask_function) == (rooftile.CAUSAL, None)
    assert recognise(masking_utils.bidirectional_mask_function) == (rooftile.FULL, None)
    window = masking_utils.sliding_window_causal_mask_function(5)
    assert recognise(window) == (rooftile.CAUSAL & rooftile.Window(4), None)
    assert recognise(masking_utils.sliding_window_causal_mask_function(0)) is None
    assert recognise(masking_utils.sliding_window_bidirectional_mask_function(5)) == (rooftile.Window(5, 5), None)
    chunks = masking_utils.chunked_causal_mask_function(5, torch.zeros(1))
    assert recognise(chunks) == (rooftile.CAUSAL & rooftile.Chunk(5), None)
    ids = torch.zeros(1, 3)
    packed = masking_utils.packed_sequence_mask_function(ids)
    assert recognise(masking_utils.and_masks(window, packed)) == (rooftile.CAUSAL & rooftile.Window(4), ids)
    for unknown in (
        lambda b, h, i, j: j <= i,
        masking_utils.or_masks(window, packed),
        masking_utils.and_masks(window, lambda b, h, i, j: j > 2),
        masking_utils.blockwise_overlay(ids),
    ):
        assert recognise(unknown) is None
