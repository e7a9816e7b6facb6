"""Models that ranks share (tensor parallelism): what the tests of it save, and what each rank runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from rooftile.models import Decoder, ModelConfig
from rooftile.models.placement import Placement
from tests.models import checkpoints, experts, latent, recurrent, sparse, wrappers
from tests.models.hybrids import mixed

LENGTHS = (13, 1, 6)
# sizes that four ranks share, too
DELTA = recurrent.DELTA | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
BAMBA = recurrent.BAMBA | {"num_attention_heads": 4, "hidden_size": 48}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bamba, four heads": lambda: transformers.BambaConfig(**BAMBA | {"mamba_n_groups": 2}, mamba_proj_bias=True),
    "qwen3_next, four heads": lambda: transformers.Qwen3NextConfig(**DELTA, **recurrent.EXPERTS, head_dim=16),
    "qwen3_5_text, four heads": lambda: transformers.Qwen3_5TextConfig(**DELTA, head_dim=16),
    # two heads of keys in the recurrence: two ranks hold each
    "olmo_hybrid, four heads": lambda: transformers.OlmoHybridConfig(**DELTA | {"linear_num_key_heads": 2}),
    "nemotron_h, four groups": lambda: transformers.NemotronHConfig(**recurrent.NEMOTRON | {"n_groups": 4}, use_bias=True),
}  # fmt: skip
NATIVE_SPARSE = "native_sparse"
# a model for each family, and for each way of its files to hold parts side by side, transposed or stacked
BOTH = (
    "llama, tied", "llama, biases", "gpt2", "gpt2, untied, unscaled", "phi3, no window", "gemma2", "granite", "olmo2",
    "olmo3, yarn", "mixtral", "qwen3_moe, some dense", "olmoe, clipped", "granitemoehybrid, rope, groups",
    "granitemoehybrid, dense", "gpt_oss", "jamba, biases", "mamba, untied, biases", "falcon_mamba", "mamba2, tied, biases",
    "mamba2, groups", "deepseek_v3", "deepseek_v2, greedy", "deepseek_v3, halves, biases", "qwen3_vl_moe",
    "nemotron_h, four groups", NATIVE_SPARSE,
)  # fmt: skip
OF_TWO = (
    "mistral", "qwen2", "qwen3, biases, windows", "gemma3_text", "ministral", "ministral3", "smollm3, windows",
    "bamba, groups, biases", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text, tied, biases", "olmo_hybrid, rotary, biases",
    "nemotron_h, experts",
)  # fmt: skip
CASES = {2: (*BOTH, *OF_TWO), 4: (*BOTH, *(name for name in CONFIGS if name != "nemotron_h, four groups"))}


def save(name: str, folder: Path) -> Path:
    """Saves a tiny model with random weights, if it is not there, and returns its folder."""
    here = folder / name.replace(" ", "_")
    if not here.exists():
        if name == NATIVE_SPARSE:
            return sparse.checkpoint(here, sparse.settings())
        every = checkpoints.CONFIGS | recurrent.CONFIGS | experts.CONFIGS | latent.CONFIGS | wrappers.CONFIGS | CONFIGS
        checkpoints.saved(checkpoints.made(every[name]()), here)
    return here


def on_rank(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> Placement:
    """Returns the placement of a rank on the CPU, whose collectives are gloo's."""

    def add(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(every, x.contiguous())
        return torch.cat(every, dim=-1)

    return Placement(dtype, torch.device("cpu"), rank, ranks, add, gather)


@torch.inference_mode()
def run(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Returns hidden states and logits of a few sequences."""
    sequences = checkpoints.prompts(LENGTHS)
    positions = torch.cat([torch.arange(len(x)) for x in sequences])
    hidden = decoder(torch.cat(sequences), positions, mixed(decoder, LENGTHS))
    return hidden, decoder.logits(hidden)


def shared(rank: int, ranks: int, folders: dict[str, str]) -> dict[str, tuple[Tensor, Tensor, int, int]]:
    """Returns hidden states and logits of each model, the bytes that this rank read, and those that it holds."""
    found = {}
    for name, folder in folders.items():
        with counting() as count:
            decoder = Decoder.from_folder(folder, placement=on_rank(rank, ranks))
        held = sum(place.nbytes for _, place in decoder.tensors())
        found[name] = (*run(decoder), count[0], held)
    return found


def drawn(rank: int, ranks: int, folders: dict[str, str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns hidden states and logits with random weights."""
    configs = {name: ModelConfig.from_folder(folder) for name, folder in folders.items()}
    return {name: run(Decoder.random(config, seed=3, placement=on_rank(rank, ranks))) for name, config in configs.items()}


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts the bytes of tensors that are read from files."""
    count, plain = [0], safetensors.safe_open

    class File:
        def __init__(self, *given: Any, **named: Any) -> None:
            self.file = plain(*given, **named)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            return counted(self.file.get_tensor(name))

        def get_slice(self, name: str) -> Slice:
            return Slice(self.file.get_slice(name))

    class Slice:
        def __init__(self, part: Any) -> None:
            self.part, self.get_shape, self.get_dtype = part, part.get_shape, part.get_dtype

        def __getitem__(self, index: Any) -> Tensor:
            return counted(self.part[index])

    def counted(x: Tensor) -> Tensor:
        count[0] += x.nbytes
        return x

    safetensors.safe_open = File
    try:
        yield count
    finally:
        safetensors.safe_open = plain
