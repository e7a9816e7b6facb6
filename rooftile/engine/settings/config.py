"""`EngineConfig`: the settings of an engine, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rooftile.engine.mixers.approximation import Approximation, check_approximation
from rooftile.engine.settings.changed import changed
from rooftile.engine.settings.table import SETTINGS, check_settings, is_fp8
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.dtypes import dtype_word, torch_dtype
from rooftile.runtime.words import answers_words
from rooftile.weights.files.plan import Weights, check_words

FP8 = torch.float8_e4m3fn


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine; `LLM` takes the same keywords, and `rooftile serve` and `generate` the same flags.

    Args:
        dtype: the dtype of weights and computation, as torch.bfloat16, "bfloat16" or "bf16"; "auto" takes the checkpoint's.
        device: None or "auto" takes a GPU if there is one.
        max_model_len: the longest sequence in tokens, prompt and answer together; None takes what the model has positions for,
            or what the cache has room for if that is less.
        block_size: tokens per block of the KV cache, a power of two of at least 8.
        num_blocks: blocks in the KV cache; None takes what fits into memory.
        max_batched_tokens: the most tokens that the model reads in one step.
        gpu_memory_utilization: the share of a GPU's memory that model and cache may take, above 0 and at most 1.
        kv_dtype: the dtype of the KV cache: "auto" takes the model's, which may be named, too; "fp8" takes half of 16 bits, plus
            a scale per token, head, key and value.
        allocator: "paged", or "contiguous" to reserve max_model_len tokens for each sequence, for comparison.
        tensor_parallel_size: must be 1.
        max_num_seqs: the most answers that run at once.
        enforce_eager: run without CUDA graphs.
        enable_prefix_caching: whether prompts that begin alike share what is cached.
        deterministic: whether an answer's bits may not depend on what runs beside it (see `LLM`).
        seed: makes the samples of requests without a seed of their own the same in each run, if the requests come in the same
            order; None for random samples.
        tokenizer: a folder with another tokenizer than the model's.
        chat_template: a file with a chat template, or its text, in place of the model's.
        download: whether a model that is named, and not in the Hugging Face Hub's cache on this machine, is downloaded.
        generation_config: "auto" takes temperature, top_p, top_k, min_p and repetition_penalty of requests without SamplingParams
            from the checkpoint's generation_config.json, and logs what else there is not applied; "none" takes the usual ones.
        approximate: what `rooftile calibrate` fitted to the model, as the file that it wrote or as the object: answers then read
            only a share of the cached keys. None for exact attention.
        weights: the format of the layers' projections: "auto" takes the checkpoint's, also one that others have quantised; a
            word of `rooftile.quantise_weight`, as "fp8" or "int4:64", quantises a 16-bit checkpoint while it is read; "2:4" keeps
            the two largest of each four weights of a row (without training for it, this costs much quality); a dictionary
            {pattern of module names: word} mixes them. Embedding, head and norms stay as they are.

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
    max_num_seqs: int = 256
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    deterministic: bool = False
    seed: int | None = None
    tokenizer: str | Path | None = None
    chat_template: str | Path | None = None
    download: bool = False
    generation_config: Literal["auto", "none"] = "auto"
    approximate: Approximation | str | Path | None = None
    weights: Weights = "auto"

    def __repr__(self) -> str:
        return changed(self)

    def __post_init__(self) -> None:
        check_settings({name: getattr(self, name) for name in SETTINGS})
        if self.dtype != "auto":
            object.__setattr__(self, "dtype", torch_dtype(self.dtype))
        object.__setattr__(self, "kv_dtype", "fp8" if is_fp8(self.kv_dtype) else dtype_word(self.kv_dtype, auto=True))
        self._check_device()
        check_words(self.weights)
        check_approximation(self.approximate)

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
