"""`EngineConfig`: the settings of an engine, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rooftile.approximate import LokiLayers
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models.checkpoints.plan import Weights, check_words
from rooftile.serve.changed import changed

FP8 = torch.float8_e4m3fn
# each answer has a row in tables of blocks and of sampling parameters
MOST_SEQS = 1 << 16
_DTYPES = {
    "float32": torch.float32, "float": torch.float32, "float16": torch.float16, "half": torch.float16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine; `LLM` takes the same keywords.

    Args:
        dtype: the dtype of weights and computation, as torch.bfloat16 or "bfloat16"; "auto" takes the checkpoint's.
        device: None takes a GPU if there is one.
        max_model_len: the longest sequence in tokens, prompt and answer together; None takes what the model has positions for,
            or what the cache has room for if that is less.
        block_size: tokens per block of the KV cache, a power of two of at least 8.
        num_blocks: blocks in the KV cache; None takes what fits into memory.
        max_batched_tokens: the most tokens that the model reads in one step.
        gpu_memory_utilization: the share of a GPU's memory that model and cache may take, above 0 and at most 1.
        kv_dtype: the dtype of the KV cache: "auto" takes the model's; "fp8" takes half of 16 bits, plus a scale per token, head,
            key and value.
        allocator: "paged", or "contiguous" to reserve max_model_len tokens for each sequence, for comparison.
        tensor_parallel_size: must be 1.
        max_num_seqs: the most answers that run at once.
        enforce_eager: run without CUDA graphs.
        enable_prefix_caching: whether prompts that begin alike share what is cached.
        deterministic: whether an answer's bits may not depend on what runs beside it (see `LLM`).
        seed: makes the samples of requests without a seed of their own the same in each run, if the requests come in the same
            order; None for random samples.
        tokenizer: a folder with another tokenizer than the model's.
        download: whether a model that is named, and not in the Hugging Face Hub's cache on this machine, is downloaded.
        generation_config: "auto" takes temperature, top_p, top_k and repetition_penalty of requests without SamplingParams from
            the checkpoint's generation_config.json; "none" takes the usual ones.
        approximate: Loki for each layer (`rooftile.approximate.LokiLayers`, or the file that `rooftile calibrate` wrote): answers
            then read only a share of the cached keys. None for exact attention.
        weights: the format of the layers' projections: "auto" takes the checkpoint's, also one that others have quantised; a
            word of `rooftile.quantise_weight`, as "fp8" or "int4:64", quantises a 16-bit checkpoint while it is read; "2:4" keeps
            the two largest of each four weights of a row (without training for it, this costs much quality); a dictionary
            {pattern of module names: word} mixes them. Embedding, head and norms stay as they are.

    Raises:
        InvalidInput: a value makes no sense; the sentence says which one and what it must be.
        Unsupported: a value names a feature that is missing here.

    Example:
        >>> from rooftile.serve import EngineConfig
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
    download: bool = False
    generation_config: Literal["auto", "none"] = "auto"
    approximate: LokiLayers | str | Path | None = None
    weights: Weights = "auto"

    def __repr__(self) -> str:
        return changed(self)

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPES.get(self.dtype, self.dtype))
        self._check_choices()
        self._check_numbers()
        self._check_device()
        check_words(self.weights)
        if self.approximate is not None:
            self._check_approximate()

    def cache_dtype(self, computed: torch.dtype) -> torch.dtype:
        """Returns the dtype of the KV cache for a model that computes in `computed`."""
        return FP8 if self.kv_dtype == "fp8" else computed

    def _check_choices(self) -> None:
        if self.tensor_parallel_size != 1:
            raise Unsupported(f"tensor_parallel_size is {self.tensor_parallel_size}; has 1")
        if self.kv_dtype not in ("auto", "fp8"):
            raise Unsupported(f'kv_dtype is {self.kv_dtype!r}; has "auto", the dtype of the model, and "fp8"')
        if self.allocator not in ("paged", "contiguous"):
            raise InvalidInput(f'allocator is {self.allocator!r}; must be "paged" or "contiguous"')

        if self.generation_config not in ("auto", "none"):
            raise InvalidInput(f'generation_config is {self.generation_config!r}; must be "auto" or "none"')
        for name in ("enforce_eager", "enable_prefix_caching", "deterministic", "download"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name} is {getattr(self, name)!r}; must be True or False")
        if self.dtype != "auto" and not isinstance(self.dtype, torch.dtype):
            raise InvalidInput(f'dtype is {self.dtype!r}; must be "auto", {", ".join(map(repr, _DTYPES))} or a dtype of torch')
        if not isinstance(self.tokenizer, str | Path | None):
            raise InvalidInput(f"tokenizer is {self.tokenizer!r}; must be a folder with one, or None for the model's")

    def _check_approximate(self) -> None:
        if not isinstance(self.approximate, LokiLayers | str | Path):
            raise InvalidInput(
                f"approximate is {repr(self.approximate)[:60]}; must be rooftile.approximate.LokiLayers, or a file of "
                "`rooftile calibrate`"
            )
        if self.deterministic:
            raise Unsupported("approximate and deterministic are both given; Loki's choice of pages depends on the last bits")
        if self.kv_dtype == "fp8":
            raise Unsupported('approximate is given and kv_dtype is "fp8"; Loki has caches in the dtype of the model')

    def _check_numbers(self) -> None:
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**63):
            raise InvalidInput(f"seed is {self.seed!r}; must be a whole number from 0 to {2**63 - 1}, or None")
        size = self.block_size
        if not _is_whole(size) or size < 8 or size & (size - 1):
            raise InvalidInput(f"block_size is {size}; must be a power of two of at least 8")
        for name in ("max_batched_tokens", "max_num_seqs", "num_blocks"):
            value = getattr(self, name)
            if not (value is None and name == "num_blocks") and (not _is_whole(value) or value < 1):
                raise InvalidInput(f"{name} is {value!r}; must be a whole number of at least 1")
        if self.max_num_seqs > MOST_SEQS:
            raise InvalidInput(f"max_num_seqs is {self.max_num_seqs:,}; may be at most {MOST_SEQS:,}")
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidInput(f"gpu_memory_utilization is {share!r}; must be above 0 and at most 1")
        if self.max_model_len is not None and not _is_whole(self.max_model_len):
            raise InvalidInput(f"max_model_len is {self.max_model_len!r}; must be a whole number")

    def _check_device(self) -> None:
        if self.device is None:
            return
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError):
            raise InvalidInput(
                f'device is {self.device!r}; must be a device of torch, such as "cuda" or "cpu", or None'
            ) from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
