"""The keywords of vLLM's `LLM` and `SamplingParams` that have another name here, or no meaning here.

A keyword that asks for what happens anyway is accepted; every other one is refused with its reason, never ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from rooftile.errors import Unsupported

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

LLM_RENAMED = {"kv_cache_dtype": "kv_dtype", "max_num_batched_tokens": "max_batched_tokens"}
LLM_REFUSED = {
    "allowed_local_media_path": Refused(("",), _TEXT),
    "allowed_media_domains": Refused((), _TEXT),
    "attention_config": Refused((), "rt.explain says which kernel runs, and the engine chooses it"),
    "chat_template": Refused((), "the checkpoint's own template is used; edit chat_template.jinja in its folder"),
    "compilation_config": Refused((), "kernels are compiled when the LLM is made"),
    "convert": Refused(("auto", "none"), "an LLM generates text"),
    "cpu_offload_gb": Refused((0,), "weights stay on the device"),
    "data_parallel_size": Refused((1,), _ONE_GPU),
    "disable_async_output_proc": Refused((False,), "the next step always runs while outputs are read"),
    "disable_custom_all_reduce": Refused((False, True), _ONE_GPU),
    "disable_log_stats": Refused((True,), "nothing is logged; engine.steps and engine.pool have the numbers"),
    "distributed_executor_backend": Refused((), _ONE_GPU),
    "enable_chunked_prefill": Refused((True,), "prompts are always read in chunks"),
    "enable_lora": Refused((False,), "adapters are not read; merge them into the weights"),
    "enable_return_routed_experts": Refused((False,), "the families here have no experts"),
    "hf_overrides": Refused(({},), "edit config.json in a copy of the folder"),
    "hf_token": Refused((False,), "log in with `hf auth login`"),
    "kv_cache_memory_bytes": Refused((), "give num_blocks; llm.pages says how much memory a block takes"),
    "limit_mm_per_prompt": Refused(({},), _TEXT),
    "load_format": Refused(("auto", "safetensors"), "weights are read from safetensors"),
    "logits_processors": Refused(([],), _LOGITS),
    "max_logprobs": Refused((), "a request may ask for 20 logprobs"),
    "max_seq_len_to_capture": Refused((), "graphs serve sequences of any length"),
    "mm_processor_kwargs": Refused(({},), _TEXT),
    "offload_group_size": Refused((0,), "weights stay on the device"),
    "offload_num_in_group": Refused((1,), "weights stay on the device"),
    "offload_params": Refused(((), []), "weights stay on the device"),
    "offload_prefetch_step": Refused((1,), "weights stay on the device"),
    "override_pooler_config": Refused((), "an LLM generates text"),
    "pipeline_parallel_size": Refused((1,), _ONE_GPU),
    "pooler_config": Refused((), "an LLM generates text"),
    "profiler_config": Refused((), "profile with torch.profiler, which sees every kernel"),
    "quantization": Refused((), "a quantised checkpoint is read as it is; weights= quantises one in 16 bits"),
    "quantization_config": Refused((), "a quantised checkpoint is read as it is; weights= quantises one in 16 bits"),
    "revision": Refused((), _HUB),
    "runner": Refused(("auto", "generate"), "an LLM generates text"),
    "served_model_name": Refused((), "an LLM serves no network"),
    "skip_tokenizer_init": Refused((False,), "remove the tokenizer's files from a copy of the folder"),
    "speculative_config": Refused((), "tokens are computed one by one"),
    "structured_outputs_config": Refused((), _LOGITS),
    "swap_space": Refused((0,), "a preempted request is computed again, and nothing is swapped"),
    "task": Refused(("auto", "generate"), "an LLM generates text"),
    "tokenizer_mode": Refused(("auto",), "tokenizer.json is read, or older files through Transformers"),
    "tokenizer_revision": Refused((), _HUB),
    "trust_remote_code": Refused((False,), "no code of a checkpoint is run"),
}
SAMPLING_RENAMED = {"include_stop_str_in_output": "include_stop", "structured_outputs": "structured"}
SAMPLING_REFUSED = {
    "best_of": Refused((1,), "ask for n answers with logprobs, and take those with the best cumulative_logprob"),
    "detokenize": Refused((True,), "text is put together when it is read, so unread text costs little"),
    "extra_args": Refused(({},), "there are no plugins"),
    "flat_logprobs": Refused((False,), "logprobs are dictionaries"),
    "guided_decoding": Refused((), "write structured={\"json\": ...}, {\"regex\": ...} or {\"choice\": [...]}"),
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
        TypeError: one of them has the same meaning as another.
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
            raise TypeError(f"{owner} got {name} and {ours}, which mean the same; give one of them")
        found[ours] = value
    return found


def takes_vllm_names(renamed: Mapping[str, str], refused: Mapping[str, Refused]) -> Callable[[T], T]:
    """Lets a class take vLLM's keywords beside its own."""

    def decorate(cls: T) -> T:
        made: Any = cls
        init = made.__init__

        @functools.wraps(init)
        def with_names(self: Any, *args: Any, **given: Any) -> None:
            init(self, *args, **(in_our_names(cls.__name__, given, renamed, refused) if given else given))

        made.__init__ = with_names
        return cls

    return decorate
