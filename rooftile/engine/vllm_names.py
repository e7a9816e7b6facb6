"""The keywords of vLLM's `LLM` and `SamplingParams` that have another name here, or no meaning here.

A keyword that asks for what happens anyway is accepted; every other one is refused with its reason, never ignored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from rooftile.engine.settings.table import SETTINGS
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.words import unknown_word

T = TypeVar("T", bound=type)


class Refused(NamedTuple):
    """A keyword without a meaning here: the values that ask for what happens anyway (None always does), and the reason."""

    accepted: tuple[Any, ...]
    reason: str


_ONE_GPU = "an LLM runs on one device"
_TEXT = "an LLM reads text and tokens"
_LOGITS = "choose tokens with allowed_token_ids, bad_words or logit_bias"
_OUTPUTS = "stream yields whole outputs, and generate the last ones"
_HUB = "give the folder of the revision"

_EXPERTS = "the families here have no experts"
_GRAPHS = "graphs are captured for about twenty numbers of answers when the LLM is made"
_LORA = "adapters are not read; merge them into the weights"
_CACHE = "a cache belongs to one LLM"

LLM_RENAMED = {each.vllm: each.name for each in SETTINGS.values() if each.vllm is not None}
LLM_REFUSED = {
    "additional_config": Refused(({},), "a model has the settings of its own config.json"),
    "allowed_local_media_path": Refused(("",), _TEXT),
    "allowed_media_domains": Refused((), _TEXT),
    "async_scheduling": Refused((True,), "the next step always runs while outputs are read"),
    "attention_backend": Refused((), "rt.explain says which kernel runs, and the engine chooses it"),
    "attention_config": Refused((), "rt.explain says which kernel runs, and the engine chooses it"),
    "calculate_kv_scales": Refused((True,), "an FP8 cache always finds its scales by itself"),
    "code_revision": Refused((), "no code of a checkpoint is run"),
    "compilation_config": Refused((), "kernels are compiled when the LLM is made"),
    "config_format": Refused(("auto", "hf"), "config.json is read"),
    "convert": Refused(("auto", "none"), "an LLM generates text"),
    "cpu_offload_gb": Refused((0,), "weights stay on the device"),
    "cudagraph_capture_sizes": Refused((), _GRAPHS),
    "data_parallel_address": Refused((), _ONE_GPU),
    "data_parallel_backend": Refused(("mp",), _ONE_GPU),
    "data_parallel_rank": Refused((), _ONE_GPU),
    "data_parallel_size": Refused((1,), _ONE_GPU),
    "decode_context_parallel_size": Refused((1,), _ONE_GPU),
    "default_mm_loras": Refused((), _LORA),
    "disable_async_output_proc": Refused((False,), "the next step always runs while outputs are read"),
    "disable_cascade_attn": Refused((False, True), "prompts share memory, and each is read by its own queries"),
    "disable_custom_all_reduce": Refused((False, True), _ONE_GPU),
    "disable_hybrid_kv_cache_manager": Refused((False,), "layers with a window always give back what is behind it"),
    "disable_log_stats": Refused((True,), "nothing is logged; engine.steps and engine.pool have the numbers"),
    "disable_mm_preprocessor_cache": Refused((False,), _TEXT),
    "disable_sliding_window": Refused((False,), "a model keeps the windows that it was trained with"),
    "distributed_executor_backend": Refused((), _ONE_GPU),
    "download_dir": Refused((), "set HF_HOME, the folder of the Hugging Face Hub's cache"),
    "enable_chunked_prefill": Refused((True,), "prompts are always read in chunks"),
    "enable_eplb": Refused((False,), _EXPERTS),
    "enable_expert_parallel": Refused((False,), _EXPERTS),
    "enable_log_requests": Refused((False,), "requests are logged by `rooftile serve`, with prompts if --log-prompts is given"),
    "enable_lora": Refused((False,), _LORA),
    "enable_lora_bias": Refused((False,), _LORA),
    "enable_mfu_metrics": Refused((False,), "rooftile diagnose counts operations and bytes"),
    "enable_prompt_embeds": Refused((False,), "prompts are text or token ids"),
    "enable_return_routed_experts": Refused((False,), _EXPERTS),
    "enable_sleep_mode": Refused((False,), "delete the LLM, and make it again"),
    "expert_placement_strategy": Refused(("linear",), _EXPERTS),
    "fully_sharded_loras": Refused((False,), _LORA),
    "guided_decoding_backend": Refused(("auto", "guidance"), "grammars are those of llguidance"),
    "hf_config_path": Refused((), "config.json stands in the model's folder"),
    "hf_overrides": Refused(({},), "edit config.json in a copy of the folder"),
    "hf_token": Refused((False,), "log in with `hf auth login`"),
    "ignore_patterns": Refused((), "nothing but safetensors, JSON and tokenizers is downloaded"),
    "interleave_mm_strings": Refused((False,), _TEXT),
    "kv_cache_memory_bytes": Refused((), "give num_blocks; llm.pages says how much memory a block takes"),
    "kv_cache_metrics": Refused((False,), "metrics of the cache are always there"),
    "kv_events_config": Refused((), _CACHE),
    "kv_offloading_size": Refused((), _CACHE),
    "kv_sharing_fast_prefill": Refused((False,), "each layer has a cache of its own"),
    "kv_transfer_config": Refused((), _CACHE),
    "limit_mm_per_prompt": Refused(({},), _TEXT),
    "load_format": Refused(("auto", "safetensors"), "weights are read from safetensors"),
    "logits_processor_pattern": Refused((), _LOGITS),
    "logits_processors": Refused(([],), _LOGITS),
    "logprobs_mode": Refused(("raw_logprobs",), "logprobs are those of the model, before temperature and truncation"),
    "long_prefill_token_threshold": Refused((0,), "max_batched_tokens bounds what a step reads of prompts"),
    "lora_dtype": Refused(("auto",), _LORA),
    "lora_modules": Refused((), _LORA),
    "max_cpu_loras": Refused((), _LORA),
    "max_logprobs": Refused((), "a request may ask for 20 logprobs"),
    "max_long_partial_prefills": Refused((1,), "max_batched_tokens bounds what a step reads of prompts"),
    "max_lora_rank": Refused((16,), _LORA),
    "max_loras": Refused((1,), _LORA),
    "max_num_partial_prefills": Refused((1,), "max_batched_tokens bounds what a step reads of prompts"),
    "max_parallel_loading_workers": Refused((), "weights are read one tensor at a time"),
    "max_seq_len_to_capture": Refused((), _GRAPHS),
    "media_io_kwargs": Refused(({},), _TEXT),
    "mm_encoder_attn_backend": Refused((), _TEXT),
    "mm_processor_cache_gb": Refused((), _TEXT),
    "mm_processor_kwargs": Refused(({},), _TEXT),
    "model_impl": Refused(("auto",), "one decoder runs all families"),
    "model_loader_extra_config": Refused(({},), "weights are read from safetensors"),
    "multi_step_stream_outputs": Refused((True,), _OUTPUTS),
    "nnodes": Refused((1,), _ONE_GPU),
    "num_lookahead_slots": Refused((0,), "tokens are computed one by one"),
    "num_redundant_experts": Refused((0,), _EXPERTS),
    "num_scheduler_steps": Refused((1,), "the next step always runs while outputs are read"),
    "num_speculative_tokens": Refused((0,), "tokens are computed one by one"),
    "offload_group_size": Refused((0,), "weights stay on the device"),
    "offload_num_in_group": Refused((1,), "weights stay on the device"),
    "offload_params": Refused(((), []), "weights stay on the device"),
    "offload_prefetch_step": Refused((1,), "weights stay on the device"),
    "optimization_level": Refused((), "kernels are compiled when the LLM is made"),
    "override_generation_config": Refused(({},), "give SamplingParams, or edit generation_config.json in a copy of the folder"),
    "override_pooler_config": Refused((), "an LLM generates text"),
    "pipeline_parallel_size": Refused((1,), _ONE_GPU),
    "pooler_config": Refused((), "an LLM generates text"),
    "preemption_mode": Refused(("recompute",), "a preempted request is computed again, and nothing is swapped"),
    "prefill_context_parallel_size": Refused((1,), _ONE_GPU),
    "prefix_caching_hash_algo": Refused(("builtin", "sha256"), "prefixes are found by a keyed hash; their tokens are compared"),
    "profiler_config": Refused((), "profile with torch.profiler, which sees every kernel"),
    "pt_load_map_location": Refused(("cpu",), "weights are read from safetensors"),
    "quantization": Refused((), "a quantised checkpoint is read as it is; weights= quantises one in 16 bits"),
    "quantization_config": Refused((), "a quantised checkpoint is read as it is; weights= quantises one in 16 bits"),
    "quantization_param_path": Refused((), "an FP8 cache always finds its scales by itself"),
    "ray_workers_use_nsight": Refused((False,), _ONE_GPU),
    "reasoning_parser": Refused(("",), "text is answered as the model writes it; split it in your program"),
    "revision": Refused((), _HUB),
    "rope_scaling": Refused((), "edit config.json in a copy of the folder"),
    "rope_theta": Refused((), "edit config.json in a copy of the folder"),
    "runner": Refused(("auto", "generate"), "an LLM generates text"),
    "safetensors_load_strategy": Refused(("lazy",), "weights are read one tensor at a time"),
    "scheduler_cls": Refused((), "requests are answered in their order"),
    "scheduling_policy": Refused(("fcfs",), "requests are answered in their order"),
    "served_model_name": Refused((), "an LLM serves no network"),
    "show_hidden_metrics_for_version": Refused((), "all metrics are shown"),
    "skip_mm_profiling": Refused((False, True), _TEXT),
    "skip_tokenizer_init": Refused((False,), "remove the tokenizer's files from a copy of the folder"),
    "speculative_config": Refused((), "tokens are computed one by one"),
    "speculative_model": Refused((), "tokens are computed one by one"),
    "stream_interval": Refused((1,), _OUTPUTS),
    "structured_outputs_config": Refused((), "grammars are those of llguidance; give SamplingParams(structured=...)"),
    "swap_space": Refused((0,), "a preempted request is computed again, and nothing is swapped"),
    "task": Refused(("auto", "generate"), "an LLM generates text"),
    "tokenizer_mode": Refused(("auto",), "tokenizer.json is read, or older files through Transformers"),
    "tokenizer_pool_size": Refused((0,), "the server has threads of its own for tokenizers"),
    "tokenizer_revision": Refused((), _HUB),
    "trust_remote_code": Refused((False,), "no code of a checkpoint is run"),
    "use_tqdm_on_load": Refused((False,), "give use_tqdm to generate"),
    "use_v2_block_manager": Refused((True,), "there is one manager of blocks"),
    "video_pruning_rate": Refused((), _TEXT),
    "worker_cls": Refused(("auto",), "an engine runs in one process"),
    "worker_extension_cls": Refused(("",), "an engine runs in one process"),
}
# words of vLLM's `generate` and `chat`, and of its asynchronous engine: what to write
GENERATE_WORDS = {
    "chat_template": "give it to LLM(chat_template=...)",
    "chat_template_content_format": "templates get the content as text",
    "chat_template_kwargs": "set them in a template of your own, and give it to LLM(chat_template=...)",
    "continue_final_message": "an answer is not continued; give the prompt's text to generate",
    "documents": "write them into a message",
    "inputs": "prompts come first, by position",
    "lora_request": _LORA,
    "mm_processor_kwargs": _TEXT,
    "params": "write sampling_params=",
    "priority": "requests are answered in their order",
    "prompt_token_ids": 'a prompt may be token ids, or {"prompt_token_ids": ids}',
    "request_id": "leave it out: an output has its number, and leaving the loop aborts a request",
    "tokenization_kwargs": "encode the prompt, and give its token ids",
    "tools": "there are no tools; ask for JSON with SamplingParams(structured=...)",
}
SAMPLING_RENAMED = {"include_stop_str_in_output": "include_stop", "structured_outputs": "structured"}
SAMPLING_REFUSED = {
    "best_of": Refused((1,), "ask for n answers with logprobs, and take those with the best cumulative_logprob"),
    "detokenize": Refused((True,), "text is put together when it is read, so unread text costs little"),
    "extra_args": Refused(({},), "there are no plugins"),
    "flat_logprobs": Refused((False,), "logprobs are dictionaries"),
    "guided_decoding": Refused((), 'write structured={"json": ...}, {"regex": ...} or {"choice": [...]}'),
    "logits_processors": Refused(([],), _LOGITS),
    "logprob_token_ids": Refused((), "logprobs has the most likely tokens"),
    "output_kind": Refused((), _OUTPUTS),
    "output_text_buffer_length": Refused((0,), "the engine decides which text is held back"),
    "prompt_logprob_start": Refused((0,), "prompt_logprobs are those of the whole prompt"),
    "prompt_logprob_token_ids": Refused((), "prompt_logprobs has the most likely tokens"),
    "repetition_detection": Refused((), "give repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": Refused((0,), "the families here have no experts"),
    "skip_clone": Refused((False, True), "SamplingParams never change, so nothing clones them"),
    "skip_reading_prefix_cache": Refused((False,), "give the prompt a cache_salt of its own"),
    "spaces_between_special_tokens": Refused((True,), "the tokenizer decides about spaces"),
    "stream_interval": Refused((1,), _OUTPUTS),
    "thinking_token_budget": Refused((-1,), "max_tokens limits an answer as a whole"),
    "trace_decode_token_ids": Refused((), "prompt_logprobs scores given tokens"),
}


def in_our_names(
    owner: str, given: Mapping[str, Any], renamed: Mapping[str, str], refused: Mapping[str, Refused]
) -> dict[str, Any]:
    """Returns keyword arguments by the names that they have here.

    Raises:
        Unsupported: one of them asks for what is missing here.
        InvalidInput: one of them has the same meaning as another.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in refused:
            accepted, reason = refused[name]
            # equal and of one type: 1 is not True
            if value is not None and not any(value == one and type(value) is type(one) for one in accepted):
                raise Unsupported(f"{owner} has no {name}={str(value)[:40]}: {reason}")
            continue
        ours = renamed.get(name, name)
        if ours in found or (ours != name and ours in given):
            raise InvalidInput(f"{owner} got {name} and {ours}, which mean the same; give one of them")
        found[ours] = value
    return found


def takes_vllm_names(renamed: Mapping[str, str], refused: Mapping[str, Refused]) -> Callable[[T], T]:
    """Lets a class take vLLM's keywords beside its own, and answers all others in a sentence."""

    def decorate(cls: T) -> T:
        made: Any = cls
        init = made.__init__
        own = [name for name in inspect.signature(init).parameters if name != "self"]

        @functools.wraps(init)
        def with_names(self: Any, *args: Any, **given: Any) -> None:
            found = in_our_names(cls.__name__, given, renamed, refused) if given else given
            word = next((name for name in found if name not in own), None)
            if word is not None:
                raise unknown_word(cls.__name__, word, own)
            init(self, *args, **found)

        made.__init__ = with_names
        return cls

    return decorate
