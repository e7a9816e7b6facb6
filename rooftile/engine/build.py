"""Builds an engine from a checkpoint folder or a decoder, in the order of `build_engine`.

Whatever can be refused is refused before gigabytes of weights are read. On a GPU kernels compile in threads while weights load,
and memory for the cache is measured after both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from rooftile.approximate import LokiLayers
from rooftile.engine import memory
from rooftile.engine.attention.layout import CacheLayout
from rooftile.engine.calibration import sample_of
from rooftile.engine.compilation import Compilation
from rooftile.engine.config import EngineConfig
from rooftile.engine.engine import Engine
from rooftile.engine.runner import Runner
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput, Unsupported
from rooftile.kvcache import BlockPool, Pages, ReservedPool, WindowPool
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints.quantised import quantise_decoder
from rooftile.models.layers import Projection
from rooftile.weights.files.plan import check_device, plan_of, quantiser_of
from rooftile.weights.two_four import TwoFour

# rows that every library for 2:4 weights takes
MANY = 512
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def build_engine(model: str | Path | Decoder, config: EngineConfig) -> Engine:
    """Builds the engine of a model.

    Raises:
        InvalidInput: the model or a setting cannot be used; the sentence says why.
        Unsupported: the device, or a setting, is not supported.
    """
    device = find_device(model, config)
    shape = model.config if isinstance(model, Decoder) else ModelConfig.from_folder(model)
    max_len = longest_sequence(shape, config)
    if config.max_model_len is None and config.num_blocks is not None:
        max_len = min(max_len, config.num_blocks * config.block_size)
    check_mixers(shape, config)
    config.cache_dtype(_computed(model, shape, config))
    check_weights(model, config, device)
    loki = find_loki(shape, config)
    decoder = load_decoder(model, shape, config, device, max_len)
    if loki is not None:
        loki.check_sample(sample_of(decoder))
    layout = CacheLayout.of(shape, config.block_size, loki)
    num_blocks = count_blocks(decoder, layout, config, max_len)
    if config.max_model_len is None:
        max_len = min(max_len, num_blocks * config.block_size)
    rows = layout.rows(num_blocks, config.max_num_seqs, config.max_batched_tokens, paged=config.allocator == "paged")
    pages = allocate_pages(decoder, layout, config, num_blocks, rows)
    pool: BlockPool
    if config.allocator != "paged":
        pool = ReservedPool(num_blocks, config.block_size, reserve=max_len)
    elif rows < num_blocks:
        pool = WindowPool(num_blocks, config.block_size, rows=rows, window=layout.window, prefixes=config.enable_prefix_caching)
    else:
        pool = BlockPool(num_blocks, config.block_size, prefixes=config.enable_prefix_caching)
    return Engine(
        Runner(
            decoder,
            pages,
            config.max_num_seqs,
            max_len,
            graphs=not config.enforce_eager,
            deterministic=config.deterministic,
            loki=loki,
        ),
        pool,
        max_len=max_len,
        max_answers=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        tokenizer=find_tokenizer(model, config),
        seed=config.seed,
        shares_answers=loki is None,
    )


def find_device(model: str | Path | Decoder, config: EngineConfig) -> torch.device:
    """Returns the device of the model. A decoder must already have the dtype and device that are asked for."""
    wanted = None if config.device is None else torch.device(config.device)
    if isinstance(model, Decoder):
        its = model.embedding
        if config.dtype not in ("auto", its.dtype):
            raise InvalidInput(
                f"dtype is {config.dtype} and the decoder's {its.dtype}; make it with that dtype, or leave dtype out"
            )
        if wanted is not None and (wanted.type != its.device.type or wanted.index not in (None, its.device.index)):
            raise InvalidInput(f"device is {wanted} and the decoder is on {its.device}; make it there, or leave device out")
        return its.device
    if wanted is None:
        wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.type not in ("cuda", "cpu"):
        raise Unsupported(f'device is {str(wanted)!r}; has "cuda" and "cpu"')
    if wanted.type == "cpu":
        return wanted
    if not torch.cuda.is_available():
        raise InvalidInput(f'device is {str(wanted)!r}, and PyTorch finds no GPU; has "cpu"')
    # each thread has its own current device, so the number is fixed here
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


def _computed(model: str | Path | Decoder, shape: ModelConfig, config: EngineConfig) -> torch.dtype:
    """Returns the dtype that the model computes in."""
    if isinstance(model, Decoder):
        return model.embedding.dtype
    return config.dtype if isinstance(config.dtype, torch.dtype) else shape.dtype


def longest_sequence(shape: ModelConfig, config: EngineConfig) -> int:
    """Returns the longest sequence in tokens that the model allows and the caller asks for."""
    longest = config.max_model_len
    if longest is None:
        return shape.max_len
    if not 2 <= longest <= shape.max_len:
        raise InvalidInput(f"max_model_len is {longest:,}; the model has positions for 2 to {shape.max_len:,}")
    return longest


def load_decoder(
    model: str | Path | Decoder, shape: ModelConfig, config: EngineConfig, device: torch.device, max_len: int
) -> Decoder:
    """Loads the weights; on a GPU the kernels are compiled meanwhile, and are ready when this returns."""
    compilation = start_compiling(shape, _computed(model, shape, config), config, device, max_len)
    try:
        if isinstance(model, Decoder):
            decoder = model
            quantiser = quantiser_of(config.weights)
            if quantiser is not None:
                quantise_decoder(decoder, quantiser)
        else:
            decoder = Decoder.from_folder(
                model, config.dtype, device, max_len=max_len, weights=config.weights,
                on_layer=None if compilation is None else compilation.add,
            )  # fmt: skip
    except BaseException:
        # a caller whose folder has no weights hears that at once, and does not wait for kernels
        if compilation is not None:
            compilation.stop()
        raise
    if compilation is not None:
        compilation.add_all(decoder)
        compilation.finish()
        if not config.deterministic:
            lay_out(decoder)
    return decoder


@torch.inference_mode()
def lay_out(decoder: Decoder) -> None:
    """Runs each projection that is 2:4 once with many rows: a library lays it out then, and may not inside of a CUDA graph."""
    for module in decoder.modules():
        if isinstance(module, Projection) and any(isinstance(part, TwoFour) for part in module.parts):
            module(torch.zeros(MANY, module.inputs, dtype=decoder.embedding.dtype, device=decoder.embedding.device))


def start_compiling(
    shape: ModelConfig, computed: torch.dtype, config: EngineConfig, device: torch.device, max_len: int
) -> Compilation | None:
    """Starts to compile the model's kernels in threads; None where there is nothing to compile."""
    if device.type != "cuda":
        return None
    return Compilation(
        shape, computed, device, size=config.block_size, kv_dtype=config.cache_dtype(computed),
        longest=min(config.max_batched_tokens, max_len), deterministic=config.deterministic,
    )  # fmt: skip


def check_weights(model: str | Path | Decoder, config: EngineConfig, device: torch.device) -> None:
    """Refuses weights in a format that the GPU has no products for, before anything is loaded or compiled."""
    if device.type == "cuda":
        reader = quantiser_of(config.weights) if isinstance(model, Decoder) else plan_of(config.weights, Path(model))
        check_device(reader, device)


def check_mixers(shape: ModelConfig, config: EngineConfig) -> None:
    """Refuses settings that do not go with layers of Native Sparse Attention."""
    if "native_sparse" not in shape.mixers or shape.native_sparse is None:
        return
    what = "the model has native_sparse layers"
    if config.deterministic:
        raise Unsupported(f"deterministic is True and {what}; their bits depend on what a step reads together")
    if config.kv_dtype == "fp8":
        raise Unsupported(f'kv_dtype is "fp8" and {what}; these have caches in the dtype of the model')
    if config.approximate is not None:
        raise Unsupported(f"approximate is given and {what}, which choose keys by themselves; Loki has attention in all layers")
    if config.block_size % shape.native_sparse.stride:
        raise InvalidInput(
            f"block_size is {config.block_size} and {what} with a stride of {shape.native_sparse.stride}; must be a multiple of "
            "that"
        )


def find_loki(shape: ModelConfig, config: EngineConfig) -> LokiLayers | None:
    """Loads the rotations that are asked for, and checks that this model and these settings take them."""
    if config.approximate is None:
        return None
    loki = config.approximate if isinstance(config.approximate, LokiLayers) else LokiLayers.load(config.approximate)
    loki.check_sizes(shape.layers, shape.kv_heads, shape.head_dim)
    return loki


def count_blocks(decoder: Decoder, layout: CacheLayout, config: EngineConfig, max_len: int) -> int:
    """Returns how many blocks the cache gets; checks that one sequence of the asked length fits into them."""
    size, num_blocks = config.block_size, config.num_blocks
    if config.approximate is not None and num_blocks is not None and num_blocks > layout.most_blocks:
        raise InvalidInput(f"num_blocks is {num_blocks:,}; may be at most {layout.most_blocks:,} with approximate=")
    if num_blocks is None:
        with current_device(decoder.embedding.device):
            num_blocks = memory.blocks_that_fit(
                decoder, layout, config.cache_dtype(decoder.embedding.dtype), utilization=config.gpu_memory_utilization,
                max_batched_tokens=config.max_batched_tokens, max_answers=config.max_num_seqs, max_len=max_len,
                paged=config.allocator == "paged",
            )  # fmt: skip
        num_blocks = min(num_blocks, layout.most_blocks)
    if config.max_model_len is not None and num_blocks * size < max_len:
        raise InvalidInput(
            f"{num_blocks:,} blocks of {size} are room for {num_blocks * size:,} tokens; a sequence may have "
            f"{max_len:,}: make num_blocks larger, or max_model_len smaller"
        )
    return num_blocks


def allocate_pages(decoder: Decoder, layout: CacheLayout, config: EngineConfig, num_blocks: int, rows: int) -> Pages:
    """Allocates the memory of the KV cache."""
    cached = config.cache_dtype(decoder.embedding.dtype)
    try:
        return layout.allocate(num_blocks, rows, cached, decoder.embedding.device)
    except RuntimeError as error:
        each, more = layout.block_bytes(cached), rows * layout.row_bytes(cached)
        raise InvalidInput(
            f"no memory for a cache: {num_blocks:,} blocks (num_blocks) of {each:,} bytes take "
            f"{(num_blocks * each + more) / 1e9:,.1f} GB"
        ) from error


def find_tokenizer(model: str | Path | Decoder, config: EngineConfig) -> Tokenizer | None:
    """Loads the tokenizer that is asked for, or the checkpoint's; None if its folder has no file of one."""
    folder = config.tokenizer
    if folder is None and not isinstance(model, Decoder) and any((Path(model) / name).is_file() for name in TOKENIZER_FILES):
        folder = model
    if folder is None and config.chat_template is not None:
        raise InvalidInput("chat_template is given, and the model has no tokenizer; give a folder with one as tokenizer=")
    return None if folder is None else Tokenizer.from_folder(folder, template=config.chat_template)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's current device, on which kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
