"""Transformers' continuous batching with Rooftile's attention: the tokens that generate gives."""

from __future__ import annotations

import pytest
import torch

from rooftile.errors import Unsupported

transformers = pytest.importorskip("transformers")
# Transformers uses it to read the memory of a CPU
pytest.importorskip("psutil")

SMALL = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("registered")


# Transformers 5.24 takes the prefix off every name but its own, with a warning
takes_others = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23), reason="this one takes only functions of its own"
)


@takes_others
@pytest.mark.parametrize("window", [None, 8], ids=["full", "sliding"])
def test_generate_batch_gives_the_tokens_of_generate(window: int | None) -> None:
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    torch.manual_seed(0)
    config = transformers.MistralConfig(**SMALL, sliding_window=window) if window else transformers.LlamaConfig(**SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompts = [torch.randint(1, 99, (n,)).tolist() for n in (5, 37, 12)]
    chosen = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    due = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        due.append(model.generate(ids, generation_config=chosen, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist())
    model.set_attn_implementation("paged|rooftile")
    # the longest prompt is read in chunks, while the others decode
    batching = ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=32)
    found = model.generate_batch(inputs=prompts, generation_config=chosen, continuous_batching_config=batching)
    assert [found[key].generated_tokens for key in sorted(found)] == due


@takes_others
def test_it_is_for_continuous_batching() -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    model.set_attn_implementation("paged|rooftile")
    with pytest.raises(Unsupported, match="is for generate_batch"):
        model(torch.tensor([[1, 2, 3]]))


@pytest.mark.skipif(not takes_others.args[0], reason="this Transformers takes functions of others")
def test_a_transformers_that_takes_none_of_others_says_so() -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL)).eval()
    with pytest.warns(FutureWarning, match="prefix is no longer needed"):
        model.set_attn_implementation("paged|rooftile")
    with pytest.raises(ValueError, match="Implementation rooftile is not supported for continuous batching"):
        model.generate_batch(inputs=[[1, 2, 3]])
