"""Names of vLLM: those that mean something here, and a sentence for each of the others."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
from typing import Any

import pytest
import torch
import transformers

from rooftile.engine import EngineConfig, Logprob, SamplingParams
from rooftile.engine.llm import LLM
from rooftile.engine.vllm_names import LLM_REFUSED, LLM_RENAMED, SAMPLING_REFUSED, SAMPLING_RENAMED
from rooftile.errors import InvalidInput, Unsupported
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts, tokens_of
from tests.engine.folders import save
from tests.models.checkpoints import SMALL, VOCABULARY, saved

# the others of its EngineArgs, from those of 2025 on
MORE = [
    "additional_config", "async_scheduling", "attention_backend", "calculate_kv_scales", "code_revision",
    "config_format", "cudagraph_capture_sizes", "data_parallel_address", "data_parallel_backend",
    "data_parallel_rank", "decode_context_parallel_size", "default_mm_loras", "disable_cascade_attn",
    "disable_hybrid_kv_cache_manager", "disable_mm_preprocessor_cache", "disable_sliding_window", "download_dir",
    "enable_eplb", "enable_expert_parallel", "enable_log_requests", "enable_lora_bias", "enable_mfu_metrics",
    "enable_prompt_embeds", "enable_sleep_mode", "expert_placement_strategy", "fully_sharded_loras",
    "guided_decoding_backend", "hf_config_path", "ignore_patterns", "interleave_mm_strings", "kv_cache_metrics",
    "kv_events_config", "kv_offloading_size", "kv_sharing_fast_prefill", "kv_transfer_config",
    "logits_processor_pattern", "logprobs_mode", "long_prefill_token_threshold", "lora_dtype", "lora_modules",
    "max_cpu_loras", "max_long_partial_prefills", "max_lora_rank", "max_loras", "max_num_partial_prefills",
    "max_parallel_loading_workers", "media_io_kwargs", "mm_encoder_attn_backend", "mm_processor_cache_gb",
    "model_impl", "model_loader_extra_config", "multi_step_stream_outputs", "nnodes", "num_gpu_blocks_override",
    "num_lookahead_slots", "num_redundant_experts", "num_scheduler_steps", "num_speculative_tokens",
    "optimization_level", "override_generation_config", "preemption_mode", "prefill_context_parallel_size",
    "prefix_caching_hash_algo", "pt_load_map_location", "quantization_param_path", "ray_workers_use_nsight",
    "reasoning_parser", "rope_scaling", "rope_theta", "safetensors_load_strategy", "scheduler_cls",
    "scheduling_policy", "show_hidden_metrics_for_version", "skip_mm_profiling", "speculative_model",
    "stream_interval", "tokenizer_pool_size", "use_tqdm_on_load", "use_v2_block_manager", "video_pruning_rate",
    "worker_cls", "worker_extension_cls",
]  # fmt: skip
# the keywords of vLLM's signatures; its LLM takes those of its EngineArgs, too, of which the usual ones are here
LLM_NAMES = [
    "model", "runner", "convert", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code",
    "allowed_local_media_path", "allowed_media_domains", "tensor_parallel_size", "dtype", "quantization", "revision",
    "tokenizer_revision", "chat_template", "seed", "gpu_memory_utilization", "cpu_offload_gb", "offload_group_size",
    "offload_num_in_group", "offload_prefetch_step", "offload_params", "enforce_eager", "enable_return_routed_experts",
    "disable_custom_all_reduce", "hf_token", "hf_overrides", "mm_processor_kwargs", "pooler_config",
    "structured_outputs_config", "profiler_config", "attention_config", "kv_cache_memory_bytes", "compilation_config",
    "quantization_config", "logits_processors", "task", "swap_space", "max_seq_len_to_capture", "disable_async_output_proc",
    "override_pooler_config", "kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size",
    "enable_prefix_caching", "enable_chunked_prefill", "pipeline_parallel_size", "data_parallel_size",
    "distributed_executor_backend", "speculative_config", "enable_lora", "load_format", "served_model_name", "max_logprobs",
    "limit_mm_per_prompt", "disable_log_stats", *MORE,
]  # fmt: skip
SAMPLING_NAMES = [
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval",
    "skip_clone", "output_text_buffer_length", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args",
    "bad_words", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection", "routed_experts_prompt_start",
    "trace_decode_token_ids", "best_of", "guided_decoding", "logits_processors", "truncate_prompt_tokens",
]  # fmt: skip
TABLES = ((LLM, LLM_NAMES, LLM_RENAMED, LLM_REFUSED), (SamplingParams, SAMPLING_NAMES, SAMPLING_RENAMED, SAMPLING_REFUSED))


@pytest.mark.parametrize(("owner", "names", "renamed", "refused"), TABLES, ids=["LLM", "SamplingParams"])
def test_every_name_is_taken_or_refused_by_a_sentence(owner: Any, names: list[str], renamed: dict, refused: dict) -> None:
    own = set(inspect.signature(owner).parameters)
    assert not own & (refused.keys() | renamed.keys())
    assert set(renamed.values()) <= own
    assert set(names) >= refused.keys() | renamed.keys(), "a name that vLLM has not"
    for name in names:
        assert name in own | renamed.keys() | refused.keys(), f"{name} is a TypeError"
    first = ("nowhere",) if owner is LLM else ()
    for name, (_, reason) in refused.items():
        with pytest.raises(Unsupported) as raised:
            owner(*first, **{name: object()})
        assert str(raised.value).startswith(f"{owner.__name__} has no {name}=")
        assert str(raised.value).endswith(reason)
    with pytest.raises(InvalidInput, match=f"{owner.__name__} has no argument no_such_word: it has "):
        owner(*first, no_such_word=1)


def test_what_happens_anyway_may_be_asked_for(peers) -> None:
    accepted = {name: values[0] for name, (values, _) in LLM_REFUSED.items() if values}
    llm = LLM(peers("llama").folder, **ROOM, **accepted, quantization=None, revision=None)
    assert len(tokens_of(llm, [[1, 2]], GREEDY)) == 1
    given = {name: values[0] for name, (values, _) in SAMPLING_REFUSED.items() if values}
    assert SamplingParams(**given, output_kind=None) == SamplingParams()
    for name, value in (("trust_remote_code", 0), ("swap_space", False)):
        with pytest.raises(Unsupported, match=f"LLM has no {name}={value}"):
            LLM("nowhere", **{name: value})


def test_two_names_for_one_thing(peers) -> None:
    assert SamplingParams(include_stop_str_in_output=True) == SamplingParams(include_stop=True)
    with pytest.raises(InvalidInput, match="got include_stop_str_in_output and include_stop, which mean the same"):
        SamplingParams(include_stop=True, include_stop_str_in_output=True)
    llm = LLM(peers("llama").folder, **ROOM, max_num_batched_tokens=100, kv_cache_dtype="fp8")
    assert (llm.config.max_batched_tokens, llm.config.kv_dtype) == (100, "fp8")
    assert llm.pages.storage.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float32", torch.float32), ("half", torch.float16), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_dtypes_by_name(name: str, dtype: torch.dtype, peers) -> None:
    assert EngineConfig(dtype=name).dtype == dtype
    assert LLM(peers("llama").folder, **ROOM, dtype=name).engine.runner.decoder.embedding.dtype == dtype
    with pytest.raises(InvalidInput, match=r"dtype is 'fp4'; must be one of auto, bf16 \(bfloat16\), fp16"):
        EngineConfig(dtype="fp4")


def test_repr(peers) -> None:
    folder = peers("llama").folder
    assert repr(LLM(folder, **ROOM, kv_dtype="fp8")) == (
        f"LLM({folder}: llama in float32 on cpu; cache of 600 blocks of 16 tokens in float8_e4m3fn; at most 256 answers at once, "
        "96 tokens per sequence)"
    )


def test_a_seed_for_all_requests(peers) -> None:
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True)
    asked = prompts(3)
    first, again, other = (tokens_of(LLM(peers("llama").folder, **ROOM, seed=n), asked, params) for n in (5, 5, 6))
    assert first == again != other
    with pytest.raises(InvalidInput, match="seed is -1; must be a whole number from 0 to"):
        EngineConfig(seed=-1)


def test_cached_tokens_are_counted(peers) -> None:
    prompt, one = [n % VOCABULARY for n in range(60)], SamplingParams(temperature=0, max_tokens=1)
    for caching in (True, False):
        llm = LLM(peers("llama").folder, **ROOM, enable_prefix_caching=caching)
        counted = [llm.generate(prompt, one)[0].num_cached_tokens for _ in range(2)]
        assert counted == [0, 48 * caching]
    assert llm.generate([[VOCABULARY]], one)[0].num_cached_tokens is None


def test_the_end_of_a_prompt(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    prompt = [n % VOCABULARY for n in range(200)]
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=9, truncate_prompt_tokens=33))
    assert output.prompt_token_ids == prompt[-33:]
    assert output.outputs == llm.generate(prompt[-33:], SamplingParams(temperature=0, max_tokens=9))[0].outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_taken(temperature: float, peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    allowed = [5, 40, 96]
    params = SamplingParams(
        n=3, temperature=temperature, top_p=0.9, max_tokens=20, seed=1, allowed_token_ids=allowed, logit_bias={7: 100.0, 40: 5.0}
    )
    free = SamplingParams(n=3, temperature=1.0, max_tokens=20, seed=1)
    for asked in (params, free):
        answers = tokens_of(llm, [[1, 2, 3]], asked)[0]
        assert ({token for answer in answers for token in answer} <= {*allowed}) == (asked is params)
    with pytest.raises(InvalidInput, match=f"allowed_token_ids names token {VOCABULARY}"):
        SamplingParams(allowed_token_ids=[VOCABULARY]).check_vocabulary(VOCABULARY)
    ends = SamplingParams(allowed_token_ids=[2], min_tokens=3)
    said = "every token is forbidden where the answer begins, by allowed_token_ids and min_tokens: allow another"
    assert llm.generate([1], ends)[0].error == said


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """The folder of a model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("speaker")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420})
    saved(transformers.AutoModelForCausalLM.from_config(config), folder)
    return save("byte_level", folder)


@pytest.mark.parametrize("ahead", [False, True])
def test_bad_words_are_not_in_an_answer(ahead: bool, speaker) -> None:
    """A word of several tokens may begin, and its last token is not taken."""
    llm = LLM(speaker, **ROOM)
    llm.engine._ahead = ahead
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    free = llm.generate("cat", plain)[0].outputs[0].token_ids
    decoded = [llm.tokenizer.text_of(token) for token in free]
    # two tokens that a text of theirs is encoded to again
    at = next(n for n in range(3, 18) if llm.tokenizer.encode("".join(decoded[n : n + 2]), special=False) == free[n : n + 2])
    one, two = decoded[at], decoded[at] + decoded[at + 1]
    for word, sequence in ((one, free[at : at + 1]), (two, free[at : at + 2])):
        banned = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, bad_words=[word])
        found = llm.generate(["cat", "dog"], [banned, plain])[0].outputs[0].token_ids
        pairs = [found[n : n + len(sequence)] for n in range(len(found))]
        assert sequence in [free[n : n + len(sequence)] for n in range(20)]
        assert sequence not in pairs
        first = next(n for n in range(20) if free[n : n + len(sequence)] == sequence)
        assert found[: first + len(sequence) - 1] == free[: first + len(sequence) - 1]
    assert_clean(llm)


def test_bad_words_need_a_tokenizer(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    assert llm.generate([1], SamplingParams(bad_words=["a"]))[0].error.startswith("bad_words are given, and the model has no tok")
    with pytest.raises(InvalidInput, match=r" has no tokenizer; give a folder with one as tokenizer="):
        llm.get_tokenizer()
    for bad, sentence in (("ab", "bad_words is 'ab'; must be a list of words"), ([""], "bad_words has ''; must be strings of 1")):
        with pytest.raises(InvalidInput, match=sentence):
            SamplingParams(bad_words=bad)


def test_chat_and_decoded_tokens(speaker, peers, tmp_path) -> None:
    llm = LLM(speaker, **ROOM)
    messages = [{"role": "user", "content": "the roof"}]
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    one, two = llm.chat([messages, messages * 2], params)
    assert one.prompt_token_ids == tokenizer.chat(messages)
    assert two.prompt_token_ids == tokenizer.chat(messages * 2)
    assert llm.chat(messages, params)[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert llm.chat(messages, params, add_generation_prompt=False)[0].prompt_token_ids == tokenizer.chat(messages, False)
    for told in one.outputs[0].logprobs:
        assert len(told) >= 2
        for token, found in told.items():
            assert found.decoded_token == tokenizer.decode([token], skip_special=False)
            logprob, rank = found
            assert (found.logprob, found.rank) == (logprob, rank)
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (copied, copied.decoded_token) == (found, found.decoded_token)
    assert Logprob(-1.0, 1).decoded_token is None
    with pytest.raises(InvalidInput, match="messages is 5; must be a list of at least one"):
        llm.chat(5)
    other = save("cleaned", tmp_path)
    assert LLM(speaker, **ROOM, tokenizer=other).get_tokenizer().encode("ab") != tokenizer.encode("ab")


def test_a_bar_on_a_terminal_only(peers, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    llm = LLM(peers("llama").folder, **ROOM)
    cases = ((None, Terminal, True), (False, Terminal, False), (None, io.StringIO, False), (True, io.StringIO, True))
    for shown, kind, due in cases:
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        llm.generate([[1], [2], [VOCABULARY]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=shown)
        assert ("3/3" in stream.getvalue() and "8 tokens" in stream.getvalue()) == due
        assert bool(stream.getvalue()) == due
    with pytest.raises(InvalidInput, match="use_tqdm is 1; must be True, False or None"):
        llm.generate([1], use_tqdm=1)
