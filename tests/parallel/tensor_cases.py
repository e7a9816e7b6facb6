"""Models that ranks share (tensor parallelism): what the tests of it save, and what each rank runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rooftile.engine import LLM, SamplingParams
from rooftile.models import Decoder
from rooftile.models.placement import Placement
from tests.models import checkpoints, experts, latent, quantised, recurrent, sparse, wrappers
from tests.models import test_expert_families as mxfp4
from tests.models import test_quantised_experts as quantised_experts
from tests.models.hybrids import mixed

LENGTHS = (13, 1, 6)
# sizes that four ranks share, too
DELTA = recurrent.DELTA | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
BAMBA = recurrent.BAMBA | {"num_attention_heads": 4, "hidden_size": 48}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bamba, four heads": lambda: transformers.BambaConfig(**BAMBA | {"mamba_n_groups": 2}, mamba_proj_bias=True),
    "qwen3_next, four heads": lambda: transformers.Qwen3NextConfig(**DELTA, **recurrent.EXPERTS, head_dim=16),
    "qwen3_next, six experts": lambda: transformers.Qwen3NextConfig(
        **DELTA, **recurrent.EXPERTS | {"num_experts": 6}, head_dim=16
    ),
    "qwen3_moe, four experts": lambda: transformers.Qwen3MoeConfig(
        **experts.QWEN | {"num_experts": 4, "num_hidden_layers": 4}, decoder_sparse_step=2
    ),
    "qwen3_5_text, four heads": lambda: transformers.Qwen3_5TextConfig(**DELTA, head_dim=16),
    # two heads of keys in the recurrence: two ranks hold each
    "olmo_hybrid, four heads": lambda: transformers.OlmoHybridConfig(**DELTA | {"linear_num_key_heads": 2}),
    "nemotron_h, four groups": lambda: transformers.NemotronHConfig(**recurrent.NEMOTRON | {"n_groups": 4}, use_bias=True),
}  # fmt: skip
NATIVE_SPARSE = "native_sparse"
# a model for each family, and for each way of its files to hold parts side by side, transposed or stacked
OF_FOUR = (
    "llama, tied", "llama, biases", "gpt2", "gpt2, untied, unscaled", "phi3, no window", "gemma2", "granite", "olmo2", "mixtral",
    "qwen3_moe, some dense", "olmoe, clipped", "granitemoehybrid, rope, groups", "granitemoehybrid, dense", "gpt_oss",
    "jamba, biases", "mamba, untied, biases", "falcon_mamba", "mamba2, tied, biases", "mamba2, groups", "deepseek_v2, greedy",
    "deepseek_v3, halves, biases", "qwen3_vl_moe", NATIVE_SPARSE, *(name for name in CONFIGS if not name.endswith("experts")),
)  # fmt: skip
OF_TWO = (
    "llama, biases", "gpt2, untied, unscaled", "phi3, no window", "gpt_oss", "granitemoehybrid, rope, groups", "mamba2, groups",
    "jamba, biases", "deepseek_v3", "mistral", "qwen2", "qwen3, biases, windows", "gemma3_text", "ministral", "ministral3",
    "olmo3, yarn", "smollm3, windows", "bamba, groups, biases", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text, tied, biases",
    "olmo_hybrid, rotary, biases", "nemotron_h, experts", "glm4_moe, norms, biases", NATIVE_SPARSE,
)  # fmt: skip
# an engine's caches for each kind of layer: keys, latents, states, branches
SERVED = ("gpt2, untied, unscaled", "deepseek_v3", "jamba, biases", "bamba, groups, biases", "qwen3_next", NATIVE_SPARSE)
# the names of quantised checkpoints, and of weights that are quantised while they are read; whether the products of two
# ranks are those of one but for rounding: a rank that quantises a part of a token's activations finds scales of its own
QUANTISED: dict[str, bool] = {
    "ct int4, zeros": True, "awq": True, "ct nvfp4": True, "ct int8, weights alone": True, "ct fp8, rows": False,
    "fp8, tiles": False, "quantised head": False, "experts in ct int4": True, "gpt_oss in mxfp4": True,
    "plain, int4:32": True, "plain, 2:4": True, "plain, fp8": False, "qwen3_moe, mxfp4": True,
}  # fmt: skip
TILES = {"head_dim": 128, "intermediate_size": 256}


# whole experts per rank: the name of a model behind this word
DEALT = "dealt: "
DEALT_OF_TWO = (
    "mixtral, windows, wide heads", "olmoe, clipped", "granitemoehybrid, rope, groups", "gpt_oss", "deepseek_v3",
    "qwen3_next, six experts", "qwen3_moe, four experts", "nemotron_h, experts", "experts in ct int4", "gpt_oss in mxfp4",
    "qwen3_moe, mxfp4",
)  # fmt: skip
CASES = {
    2: (*OF_TWO, *QUANTISED, *(DEALT + name for name in DEALT_OF_TWO)),
    4: (*OF_FOUR, DEALT + "mixtral, windows, wide heads"),
}


def weights_of(name: str) -> str:
    """Returns the argument `weights` of a case."""
    name = name.removeprefix(DEALT)
    return name.split(", ")[-1] if name in ("plain, int4:32", "plain, 2:4", "plain, fp8", "qwen3_moe, mxfp4") else "auto"


def save_quantised(name: str, here: Path) -> None:
    """Saves a tiny model that is quantised, or is to be."""
    wide = transformers.Qwen3MoeConfig(**experts.QWEN | quantised_experts.SIZES | {"num_experts": 4})
    if name == "experts in ct int4":
        quantised_experts.quantised("ct int4", here, wide)
    elif name == "gpt_oss in mxfp4":
        config = transformers.GptOssConfig(**experts.GPT_OSS | {"intermediate_size": 64})
        mxfp4.in_mxfp4(here, model=checkpoints.made(config))
    elif name == "qwen3_moe, mxfp4":
        checkpoints.saved(checkpoints.made(wide), here)
    elif name.startswith("plain"):
        quantised.plain(here)
    elif name == "quantised head":
        quantised.quantised("ct fp8, rows", here)
        tensors = load_file(here / "model.safetensors")
        codes = tensors.pop("lm_head.weight").to(torch.float8_e4m3fn)
        scales = torch.rand(codes.shape[0], 1) + 0.5
        save_file(tensors | {"lm_head.weight": codes, "lm_head.weight_scale": scales}, here / "model.safetensors")
        quantised.configure(here, quantization_config=quantised.KINDS["ct fp8, rows"][0] | {"ignore": []})
    else:
        quantised.quantised(name, here, **TILES if name == "fp8, tiles" else {})


def save(name: str, folder: Path) -> Path:
    """Saves a tiny model with random weights, if it is not there, and returns its folder."""
    name = name.removeprefix(DEALT)
    here = folder / name.replace(" ", "_")
    if not here.exists():
        if name in QUANTISED:
            save_quantised(name, here)
            return here
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


class Found(NamedTuple):
    """The results of a rank with a model, and how much of its files it has read."""

    hidden: Tensor
    logits: Tensor
    read: int  # bytes
    held: int  # bytes of plain tensors
    answers: list[list[int]]  # tokens that an engine finds


def shared(rank: int, ranks: int, folders: dict[str, str]) -> dict[str, Found]:
    """Returns what a rank finds for each model; models in SERVED are run by an engine, too."""
    found = {}
    for name, folder in folders.items():
        placement = on_rank(rank, ranks)._replace(deal_experts=name.startswith(DEALT)) if ranks > 1 else None
        with counting() as count:
            decoder = Decoder.from_folder(folder, placement=placement, weights=weights_of(name))
        held = sum(place.nbytes for _, place in decoder.tensors())
        found[name] = Found(*run(decoder), count[0], held, answered(decoder) if name in SERVED and ranks < 4 else [])
    return found


def answered(decoder: Decoder) -> list[list[int]]:
    """Returns greedy answers of an engine, with chunks and preemptions; all ranks plan the same steps, so their sums meet."""
    generator = torch.Generator().manual_seed(1)
    asked = [torch.randint(97, (length,), generator=generator).tolist() for length in (20, 3, 41, 9, 1)]
    llm = LLM(decoder, block_size=8, num_blocks=12, max_model_len=64, max_batched_tokens=24, max_num_seqs=3)
    outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]


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
