"""Transformers' continuous batching, the peer of `benchmarks/serving.py`: the same requests to the same weights.

Its model has no weights of its own but views of the decoder's. It gets what it can have without another package: a cache in which
all requests find room, as many tokens a step as our engine, no search for shared prefixes, and a run of short answers before the
one that counts. It decides itself against CUDA graphs: they need padding, and the mask of its own attention makes padding dear;
of ours it does not know that it needs none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig, ContinuousBatchingManager
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rooftile.bench.workloads import Ask
from rooftile.errors import Unsupported
from rooftile.integrations import transformers as integration
from rooftile.models import Decoder, ModelConfig
from rooftile.models.weights import tensors_of

# what the run before has of each answer
WARM_TOKENS = 16
STEP_TOKENS = 8192


# the attentions that Transformers is run with
PEERS = ("paged|sdpa", "paged|rooftile")


class Answered(NamedTuple):
    """What became of requests."""

    lengths: list[int]
    """Tokens of each answer, made before the limit."""
    seconds: float
    """From the first request to the last token; the limit, if it was reached."""
    stopped: bool
    """Whether it was."""
    reason: str
    """Why requests failed, if some did before it was."""


def model_of(decoder: Decoder) -> LlamaForCausalLM:
    """A model of Transformers on a decoder's weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(decoder.config))
    weights = {name if name.startswith("lm_head") else f"model.{name}": x for name, x in tensors_of(decoder)}
    weights.setdefault("lm_head.weight", decoder.head)
    model.load_state_dict(weights, assign=True)
    # its frequencies are no weights
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(decoder.embedding.device)
    return model.requires_grad_(False).eval()


def answers(decoder: Decoder, requests: Sequence[Ask], attention: str, limit_s: float) -> dict[str, Any]:
    """What a peer's row says: rate and lengths of a run after a short one, each of at most so many seconds."""
    integration.register()
    model = model_of(decoder)
    model.set_attn_implementation(attention)
    manager = manager_of(model, requests)
    asked = [(ask.prompt, ask.params.max_tokens or 1) for ask in requests]
    try:
        manager.warmup()
        manager.start()
        warm = answered(manager, [(prompt, min(tokens, WARM_TOKENS)) for prompt, tokens in asked], limit_s)
        if warm.stopped or warm.reason:
            return {"reason": warm.reason or f"the run before, of {WARM_TOKENS} tokens an answer, did not end in {limit_s} s"}
        found = answered(manager, asked, limit_s)
    finally:
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.destroy()
    resolved = manager.continuous_batching_config
    names = ("block_size", "num_blocks", "max_batch_tokens", "use_cuda_graph", "use_async_batching")
    tokens = sum(found.lengths)
    return {
        "output_tok_s": round(tokens / found.seconds, 1), "output_tokens": tokens, "requests": len(asked),
        "as_asked": found.lengths == [tokens for _, tokens in asked], "seconds": round(found.seconds, 3),
        "stopped_at_s": limit_s if found.stopped else None, "reason": found.reason,
        "attention": attention, "sampling": f"T = {requests[0].params.temperature}",
        "settings": {name: getattr(resolved, name) for name in names},
    }  # fmt: skip


def manager_of(model: LlamaForCausalLM, requests: Sequence[Ask]) -> ContinuousBatchingManager:
    """Transformers' engine, which no end of a text stops, in a cache that holds all requests at once."""
    size = ContinuousBatchingConfig.block_size
    # it takes a block more than an answer needs now and then
    blocks = sum(-(-(len(ask.prompt) + (ask.params.max_tokens or 1)) // size) + 2 for ask in requests)
    batching = ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=min(STEP_TOKENS, sum(len(ask.prompt) for ask in requests)),
        max_requests_per_batch=len(requests), allow_block_sharing=False, safety_margin=0.0,
    )  # fmt: skip
    # -1 is its word for no end
    sampled = GenerationConfig(do_sample=True, temperature=requests[0].params.temperature, eos_token_id=-1, pad_token_id=0)
    return model.init_continuous_batching(generation_config=sampled, continuous_batching_config=batching)


def answered(manager: ContinuousBatchingManager, asked: Sequence[tuple[list[int], int]], limit_s: float) -> Answered:
    """Puts prompts to a manager that runs, each with the number of tokens that it is to get; past the limit it is stopped."""
    began = time.perf_counter()
    names = [
        manager.add_request(prompt, max_new_tokens=tokens, record_timestamps=True, eos_token_id=-1)
        for prompt, tokens in asked
    ]
    found: dict[str, Any] = {}
    while len(found) < len(names) and manager.is_running() and time.perf_counter() < began + limit_s:
        result = manager.get_result(timeout=0.1)
        if result is not None:
            found[result.request_id] = result
    stopped = len(found) < len(names) and manager.is_running()
    failed = found.copy()
    if stopped:
        # what is not complete comes back with what it has, and an error that says so
        manager.stop(hard_stop=True)
    while (result := manager.get_result(timeout=0)) is not None:
        found[result.request_id] = result
    reason = next((result.error for result in (failed if stopped else found).values() if result.error), "")
    # those that it had not looked at when it was stopped are lost
    if len(found) < len(names) and not stopped:
        reason = reason or f"{len(names) - len(found)} requests never came back"
    times = [found[name].timestamps or [] if name in found else [] for name in names]
    if stopped:
        times = [[when for when in each if when <= began + limit_s] for each in times]
    last = max((each[-1] for each in times if each), default=time.perf_counter())
    return Answered([len(each) for each in times], limit_s if stopped else last - began, stopped, reason)


def _config(config: ModelConfig) -> LlamaConfig:
    if config.family != "llama" or config.rotary is None:
        raise Unsupported(f"the model is of the family {config.family!r}; this peer has 'llama'")
    rotary = config.rotary
    rope: dict[str, Any] = {"rope_type": rotary.scaling or "default", "rope_theta": rotary.theta}
    if rotary.scaling == "llama3":
        rope |= {
            "factor": rotary.factor, "original_max_position_embeddings": rotary.original_len,
            "low_freq_factor": rotary.low_freq_factor, "high_freq_factor": rotary.high_freq_factor,
        }  # fmt: skip
    elif rotary.scaling is not None:
        raise Unsupported(f"positions are stretched by {rotary.scaling!r}; this peer has 'llama3'")
    return LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden, intermediate_size=config.ffn,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_len, rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie, rope_parameters=rope, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
