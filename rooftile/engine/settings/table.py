"""The settings of an engine: one table, from which `EngineConfig` takes its checks, and the commands take their flags.

Nothing here imports torch, so that a command refuses a wrong value before it listens or loads anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rooftile.engine.adapters.names import adapters_of, check_adapter_settings
from rooftile.engine.chat.thought_formats import check_parser
from rooftile.engine.chat.tools.choose import check_call_parser
from rooftile.engine.mixers.settings import check_approximate
from rooftile.engine.speculation.settings import check_alone, check_speculative
from rooftile.engine.text.chat_template import template_of
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.dtypes import dtype_word

# each answer has a row in tables of blocks and of sampling parameters
MOST_SEQS = 1 << 16
MOST_RANKS = 64
MOST_ADAPTERS = 1024
MOST_SEED = 2**63 - 1
# words for an FP8 cache, of which the longer ones are vLLM's and torch's
FP8_WORDS = ("fp8", "fp8_e4m3", "float8_e4m3fn")
Check = Callable[[str, Any], None]


class Setting(NamedTuple):
    """One setting.

    Args:
        name: the keyword of `LLM`, and the flag with hyphens.
        kind: the type that a flag's text becomes.
        default: the value that `LLM` takes if none is given.
        help: one line for the commands' help.
        check: raises InvalidInput or Unsupported for a wrong value; called with the name and the value.
        vllm: vLLM's name for it, if that is another.
        one: the flag's word where each flag gives one of several.
    """

    name: str
    kind: Any
    default: Any
    help: str
    check: Check
    vllm: str | None = None
    one: str | None = None

    @property
    def flag(self) -> str:
        """The flag of the commands."""
        return "--" + (self.one or self.name).replace("_", "-")


def is_whole(value: object) -> bool:
    """Tells whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(least: int, most: int | None = None, *, optional: bool = False) -> Check:
    def check(name: str, value: Any) -> None:
        if value is None and optional:
            return
        if not is_whole(value) or value < least:
            raise InvalidInput(f"{name} is {value!r}; must be a whole number of at least {least}")
        if most is not None and value > most:
            raise InvalidInput(f"{name} is {value:,}; may be at most {most:,}")

    return check


def _power_of_two(name: str, value: Any) -> None:
    _whole(1, MOST_RANKS)(name, value)
    if value & (value - 1):
        raise InvalidInput(f"{name} is {value}; must be a power of two")


def _seed(name: str, value: Any) -> None:
    if value is not None and not (is_whole(value) and 0 <= value <= MOST_SEED):
        raise InvalidInput(f"{name} is {value!r}; must be a whole number from 0 to {MOST_SEED}, or None")


def _max_model_len(name: str, value: Any) -> None:
    if value is not None and not is_whole(value):
        raise InvalidInput(f"{name} is {value!r}; must be a whole number")


def _block_size(name: str, value: Any) -> None:
    if not is_whole(value) or value < 8 or value & (value - 1):
        raise InvalidInput(f"{name} is {value}; must be a power of two of at least 8")


def _share(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0 < value <= 1:
        raise InvalidInput(f"{name} is {value!r}; must be above 0 and at most 1")


def _share_below_one(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InvalidInput(f"{name} is {value!r}; must be at least 0 and less than 1")


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}; must be True or False")


def _optional_switch(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}; must be True, False or None")


def _one_of(*words: str) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in words:
            raise InvalidInput(f"{name} is {value!r}; must be {' or '.join(f'{chr(34)}{word}{chr(34)}' for word in words)}")

    return check


def _dtype(name: str, value: Any) -> None:
    dtype_word(value, name=name, auto=True)


def _kv_dtype(name: str, value: Any) -> None:
    if str(value).removeprefix("torch.") in FP8_WORDS:
        return
    try:
        dtype_word(value, name=name, auto=True)
    except InvalidInput:
        raise Unsupported(f'{name} is {str(value)!r}; has "auto", the dtype of the model, and "fp8"') from None


def _device(name: str, value: Any) -> None:
    if isinstance(value, str) and value != "auto" and not re.fullmatch(r"(cpu|cuda(:\d+)?)", value):
        raise InvalidInput(f"{name} is {value!r}; must be cpu, cuda or cuda:N")


def _folder(name: str, value: Any) -> None:
    if not isinstance(value, str | Path | None):
        raise InvalidInput(f"{name} is {value!r}; must be a folder with one, or None for the model's")
    if value is not None and not Path(value).is_dir():
        raise InvalidInput(f"{name} is {str(value)!r}, which is not a folder; a tokenizer is read from a checkpoint's folder")


def _file(name: str, value: Any) -> None:
    # objects are checked where their class is known
    if isinstance(value, str | Path) and not Path(value).is_file():
        raise InvalidInput(f"{name} is {str(value)!r}, which is no file; give one of `rooftile calibrate`")


def _template(name: str, value: Any) -> None:
    if value is not None:
        template_of(value, name)


def _adapters(_: str, value: Any) -> None:
    adapters_of(value)


# a model's formats need torch, which checks them later once more, with their groups and patterns
_FORMATS = ("fp8", "fp8_tile", "int8", "w8", "int4", "mxfp8", "mxfp4", "nvfp4")
WEIGHT_WORDS = ("auto", *_FORMATS, "2:4")


def _weights(name: str, value: Any) -> None:
    for word in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(word, str) and word not in WEIGHT_WORDS and word.partition(":")[0] not in _FORMATS:
            raise InvalidInput(f"{name} is {word!r}; must be one of {', '.join(WEIGHT_WORDS)}, also with its group as in int4:64")


SETTINGS = {
    each.name: each
    for each in (
        Setting("dtype", str, "auto", "Dtype of the model: bf16, fp16, fp32; auto for the checkpoint's.", _dtype),
        Setting("device", str, None, "cpu, cuda or cuda:N; auto uses CUDA if there is a GPU.", _device),
        Setting("max_model_len", int, None, "Most tokens of a prompt and its answer together.", _max_model_len),
        Setting("block_size", int, 16, "Tokens per block of the KV cache.", _block_size),
        Setting(
            "num_blocks", int, None, "Blocks of the KV cache; left out, as many as fit into memory.",
            _whole(1, optional=True), "num_gpu_blocks_override",
        ),
        Setting("max_batched_tokens", int, 8192, "Most tokens read in one step.", _whole(1), "max_num_batched_tokens"),
        Setting("gpu_memory_utilization", float, 0.9, "Share of the GPU's memory for model and cache.", _share),
        Setting("kv_dtype", str, "auto", "Dtype of the KV cache: fp8; auto for the model's.", _kv_dtype, "kv_cache_dtype"),
        Setting("state_dtype", str, "fp32", "Dtype of the states of recurrences: fp32, bf16.", _one_of("fp32", "bf16")),
        Setting("state_every", int, 8192, "Most tokens of a prompt between two states that are kept for prefixes.", _whole(1)),
        Setting("state_share", float, 0.1, "Share of the caches' memory for kept states; 0 keeps none.", _share_below_one),
        Setting("allocator", str, "paged", "paged, or contiguous for comparison.", _one_of("paged", "contiguous")),
        Setting("tensor_parallel_size", int, 1, "GPUs that share the model.", _whole(1, MOST_RANKS)),
        Setting(
            "context_parallel_size", int, 1, "GPUs that deal out the tokens of each sequence in the KV cache.", _power_of_two
        ),
        Setting(
            "enable_expert_parallel", bool, None, "Whole experts per rank; left out, only where slices of them do not fit.",
            _optional_switch,
        ),
        Setting("max_num_seqs", int, 256, "Most answers that run at once.", _whole(1, MOST_SEQS)),
        Setting("enforce_eager", bool, False, "Run without CUDA graphs.", _switch),
        Setting("enable_prefix_caching", bool, True, "Let prompts that begin alike share what is cached.", _switch),
        Setting("deterministic", bool, False, "The same bits whatever runs beside a prompt, at the price of speed.", _switch),
        Setting("seed", int, None, "The same samples in each run, for requests without a seed of their own.", _seed),
        Setting("tokenizer", str, None, "A folder with another tokenizer than the model's.", _folder),
        Setting("chat_template", str, None, "A file with a chat template, or its text, in place of the model's.", _template),
        Setting(
            "reasoning_parser", str, "auto", "Marks around thoughts: think, granite, ...; auto looks at the chat template; none.",
            check_parser,
        ),
        Setting(
            "tool_call_parser", str, "auto", "Syntax of calls: hermes, mistral, ...; auto looks at the chat template; none.",
            check_call_parser,
        ),
        Setting("download", bool, False, "Download a named model that is not in the Hugging Face Hub's cache here.", _switch),
        Setting(
            "generation_config", str, "auto", "auto takes sampling parameters from generation_config.json; none does not.",
            _one_of("auto", "none"),
        ),
        Setting(
            "approximate", str, None, "A file of `rooftile calibrate`: answers read a share of the keys.", _file
        ),
        Setting(
            "task", str, "auto", "embed gives vectors, and keeps no cache; auto does where the folder asks for it; generate.",
            _one_of("auto", "embed", "generate"),
        ),
        Setting(
            "adapters", list[str], None, "A LoRA adapter as name=folder; may be given several times.", _adapters,
            "lora_modules", "adapter",
        ),
        Setting("max_adapters", int, None, "Most adapters at once.", _whole(1, MOST_ADAPTERS, optional=True), "max_loras"),
        Setting("max_adapter_rank", int, None, "Largest rank of an adapter.", _whole(1, 256, optional=True), "max_lora_rank"),
        Setting(
            "speculative", str, None, "Guess tokens and check several at once: lookup, or JSON with a method or a draft model.",
            check_speculative, "speculative_config",
        ),
        Setting("weights", str, "auto", "Format of the projections: fp8, int8, w8, int4:64, 2:4; auto takes theirs.", _weights),
    )
}  # fmt: skip
FLAGS = {name: each.flag for name, each in SETTINGS.items()}


def check_settings(given: Mapping[str, Any]) -> None:
    """Checks settings, alone and together, as far as neither torch nor the model is needed.

    Raises:
        InvalidInput: a value makes no sense; the sentence says which one and what it must be.
        Unsupported: a value names a feature that is missing here.
    """
    for name, value in given.items():
        SETTINGS[name].check(name, value)
    check_approximate(given, fp8=is_fp8(given.get("kv_dtype")))
    _check_context(given)
    check_adapter_settings(given)
    check_alone(given)


def _check_context(given: Mapping[str, Any]) -> None:
    """Refuses settings that do not go with a sequence on several ranks."""
    ranks = given.get("context_parallel_size", 1)
    if ranks == 1:
        return
    if given.get("tensor_parallel_size", 1) > 1:
        raise Unsupported(
            f"context_parallel_size is {ranks} and tensor_parallel_size is {given['tensor_parallel_size']}; an engine has one of "
            "them at a time: leave one out"
        )
    for name in ("approximate", "deterministic"):
        if given.get(name):
            raise Unsupported(f"context_parallel_size is {ranks} and {name} is given; it has none with it: leave one out")


def ranks_of(settings: Mapping[str, Any]) -> int:
    """Returns how many ranks an engine with these settings has, each on a GPU of its own."""
    ranks: int = settings.get("tensor_parallel_size", 1) * settings.get("context_parallel_size", 1)
    return ranks


def is_fp8(kv_dtype: object) -> bool:
    """Tells whether a cache is in FP8."""
    return str(kv_dtype).removeprefix("torch.") in FP8_WORDS
