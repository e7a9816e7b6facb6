"""`EngineConfig`: the settings of an engine, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rooftile.engine.adapters.names import adapters_of
from rooftile.engine.mixers.approximation import Approximation, check_approximation
from rooftile.engine.settings.changed import changed
from rooftile.engine.settings.table import SETTINGS, check_settings, is_fp8
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.arguments import as_python_numbers
from rooftile.runtime.dtypes import dtype_word, torch_dtype
from rooftile.runtime.words import answers_words
from rooftile.weights.files.plan import Weights, check_words

FP8 = torch.float8_e4m3fn


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine: the keywords of `LLM`, which says what each does, and their defaults.

    `rooftile serve` and `generate` take them as flags.

    Raises:
        InvalidInput: a value makes no sense; the sentence says which one and what it must be.
        Unsupported: a value names a feature that is missing here.

    Example:
        >>> from rooftile.engine import EngineConfig
        >>> EngineConfig(max_model_len=4096).block_size
        16
    """

    dtype: torch.dtype | str = "auto"
    device: torch.device | str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    max_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_dtype: str = "auto"
    allocator: Literal["paged", "contiguous"] = "paged"
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_expert_parallel: bool | None = None
    max_num_seqs: int = 256
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    deterministic: bool = False
    seed: int | None = None
    tokenizer: str | Path | None = None
    chat_template: str | Path | None = None
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    download: bool = False
    generation_config: Literal["auto", "none"] = "auto"
    approximate: Approximation | str | Path | None = None
    adapters: Mapping[str, str | Path] | Sequence[str] | None = None
    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    task: Literal["auto", "embed", "generate"] = "auto"
    weights: Weights = "auto"
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    state_every: int = 8192
    state_share: float = 0.1
    speculative: str | Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return changed(self)

    def __post_init__(self) -> None:
        as_python_numbers(self)
        check_settings({name: getattr(self, name) for name in SETTINGS})
        if self.dtype != "auto":
            object.__setattr__(self, "dtype", torch_dtype(self.dtype))
        object.__setattr__(self, "kv_dtype", "fp8" if is_fp8(self.kv_dtype) else dtype_word(self.kv_dtype, auto=True))
        self._check_device()
        check_words(self.weights)
        check_approximation(self.approximate)

    @property
    def ranks(self) -> int:
        """The processes that an engine has."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def adapter_slots(self) -> int:
        """How many adapters there may be at once."""
        return len(adapters_of(self.adapters)) if self.max_adapters is None else self.max_adapters

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, of all ranks together."""
        return self.block_size * self.context_parallel_size

    def cache_dtype(self, computed: torch.dtype) -> torch.dtype:
        """Returns the dtype of the KV cache for a model that computes in `computed`.

        Raises:
            Unsupported: another dtype is asked for.
        """
        if self.kv_dtype not in ("auto", "fp8") and self.kv_dtype != dtype_word(computed):
            raise Unsupported(
                f"kv_dtype is {self.kv_dtype!r} and the model computes in {dtype_word(computed)}; has the model's dtype, and "
                '"fp8"'
            )
        return FP8 if self.kv_dtype == "fp8" else computed

    def _check_device(self) -> None:
        if self.device in (None, "auto"):
            object.__setattr__(self, "device", None)
            return
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError):
            raise InvalidInput(
                f'device is {self.device!r}; must be a device of torch, such as "cuda" or "cpu", or None'
            ) from None
