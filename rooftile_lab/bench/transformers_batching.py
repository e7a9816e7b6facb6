"""Transformers' continuous batching, the peer of `rooftile bench engine`: the same requests on the same weights.

The model of Transformers holds views of the decoder's weights. It is given all that it can have without another package: a cache
with room for all requests, as many tokens per step as our engine, no search for shared prefixes, and a run of short answers
before the one that counts. It decides against CUDA graphs by itself: they need padding, which its own attention's mask makes
expensive, and it does not know that ours needs no mask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig, ContinuousBatchingManager  # type: ignore[attr-defined]
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rooftile.errors import Unsupported
from rooftile.integrations import transformers as integration
from rooftile.models import Decoder, ModelConfig
from rooftile_lab.bench.workloads import WorkloadRequest

# tokens of each answer in the run before the one that counts
WARM_TOKENS = 16
STEP_TOKENS = 8192
# from 5.23 on Transformers knows its own functions without the prefix, and batches with no others
ONLY_ITS_OWN = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
# the tokens of a layer that are stored together, in the words of Transformers after 5.17 and before
SIZE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"


class Answers(NamedTuple):
    """A peer's run: rate and lengths; only `reason` if it never got that far."""

    output_tok_s: float = 0.0
    output_tokens: int = 0
    requests: int = 0
    as_asked: bool = False
    seconds: float = 0.0
    reason: str = ""
    settings: dict[str, Any] | None = None


class Answered(NamedTuple):
    """How requests ended."""

    lengths: list[int]
    """Tokens of each answer, made before the limit."""
    seconds: float
    """From the first request to the last token; the limit, if it was reached."""
    stopped: bool
    """Whether the limit was reached."""
    reason: str
    """Why requests failed, if some did before the limit."""


def model_of(decoder: Decoder) -> LlamaForCausalLM:
    """A model of Transformers on a decoder's weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(decoder.config))
    weights = {name if name.startswith("lm_head") else f"model.{name}": x for name, x in decoder.tensors()}
    weights.setdefault("lm_head.weight", decoder.head)
    model.load_state_dict(weights, assign=True)
    # its frequencies are no weights
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(decoder.embedding.device)
    return model.requires_grad_(False).eval()


def answers(decoder: Decoder, requests: Sequence[WorkloadRequest], attention: str, limit_s: float) -> Answers:
    """Rate and lengths of a run after a short one, each of at most `limit_s` seconds."""
    integration.register()
    if ONLY_ITS_OWN:
        if attention == integration.PAGED:
            return Answers(reason=f"refused: Transformers {transformers.__version__} batches with no attention but its own")
        attention = attention.removeprefix("paged|")
    model = model_of(decoder)
    model.set_attn_implementation(attention)
    manager = manager_of(model, requests)
    asked = [(ask.prompt, ask.params.max_tokens or 1) for ask in requests]
    try:
        manager.warmup()
        manager.start()
        warm = answered(manager, [(prompt, min(tokens, WARM_TOKENS)) for prompt, tokens in asked], limit_s)
        if warm.stopped or warm.reason:
            late = f"the first run, of {WARM_TOKENS} tokens per answer, did not end in {limit_s} s"
            return Answers(reason=warm.reason or late)
        found = answered(manager, asked, limit_s)
    finally:
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.destroy()
    resolved = manager.continuous_batching_config
    names = (SIZE, "num_blocks", "max_batch_tokens", "use_cuda_graph", "use_async_batching")
    values = {name: getattr(resolved, name) for name in names}
    # JSON has no tuples
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    settings = values | {"sampling": f"T = {requests[0].params.temperature}"}
    if found.stopped:
        settings["stopped_at_s"] = limit_s
    tokens = sum(found.lengths)
    return Answers(
        output_tok_s=tokens / found.seconds, output_tokens=tokens, requests=len(asked), seconds=found.seconds,
        as_asked=found.lengths == [tokens for _, tokens in asked], reason=found.reason, settings=settings,
    )  # fmt: skip


def manager_of(model: LlamaForCausalLM, requests: Sequence[WorkloadRequest]) -> ContinuousBatchingManager:
    """Transformers' engine with a cache that holds all requests at once; no end of a text stops an answer."""
    size = getattr(ContinuousBatchingConfig, SIZE)
    # now and then it takes a block more than an answer needs
    blocks = sum(-(-(len(ask.prompt) + (ask.params.max_tokens or 1)) // size) + 2 for ask in requests)
    # it would change to another package's attention by itself
    own: dict[str, Any] = {"auto_switch_to_flash": False} if ONLY_ITS_OWN else {}
    batching = ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=min(STEP_TOKENS, sum(len(ask.prompt) for ask in requests)),
        max_requests_per_batch=len(requests), allow_block_sharing=False, safety_margin=0.0,
        **own,
    )  # fmt: skip
    # -1 means that no token ends a text
    sampled = GenerationConfig(do_sample=True, temperature=requests[0].params.temperature, eos_token_id=-1, pad_token_id=0)
    return model.init_continuous_batching(generation_config=sampled, continuous_batching_config=batching)


def answered(manager: ContinuousBatchingManager, asked: Sequence[tuple[list[int], int]], limit_s: float) -> Answered:
    """Sends prompts, each with the number of tokens it asks for, to a running manager, which is stopped at the limit."""
    began = time.perf_counter()
    names = [
        manager.add_request(prompt, max_new_tokens=tokens, record_timestamps=True, eos_token_id=-1) for prompt, tokens in asked
    ]
    found: dict[str, Any] = {}
    while len(found) < len(names) and manager.is_running() and time.perf_counter() < began + limit_s:
        result = manager.get_result(timeout=0.1)
        if result is not None:
            found[result.request_id] = result
    stopped = len(found) < len(names) and manager.is_running()
    failed = found.copy()
    if stopped:
        # incomplete answers come back with the tokens they have, and an error that says so
        manager.stop(hard_stop=True)
    while (result := manager.get_result(timeout=0)) is not None:
        found[result.request_id] = result
    reason = next((result.error for result in (failed if stopped else found).values() if result.error), "")
    # requests that it had not looked at when it was stopped are lost
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
