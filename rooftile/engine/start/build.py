"""Builds an engine from a checkpoint folder or a decoder, in the order of `build_engine`.

Whatever can be refused is refused before gigabytes of weights are read. On a GPU kernels compile in threads while weights load,
and memory for the cache is measured after both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from rooftile.engine.caches import memory
from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.engine import Engine
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.registry import mixers_of
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.settings.table import SETTINGS
from rooftile.engine.start.compilation import Compilation
from rooftile.engine.steps.runner import Runner
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput, Unsupported
from rooftile.kvcache.caches import Caches
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints.quantised import quantise_decoder
from rooftile.models.projection import Projection
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
    # a state may have the dtype that the model computes in, which need not be the checkpoint's
    shape = replace(shape, dtype=_computed(model, shape, config))
    mixers = mixers_of(shape, config)
    config.cache_dtype(shape.dtype)
    layout = CacheLayout(config.block_size, tuple(spec for mixer in mixers for spec in mixer.specs()))
    if config.kv_dtype == "fp8" and not layout.places:
        raise Unsupported('kv_dtype is "fp8" and no layer of the model keeps keys and values: leave kv_dtype out')
    if not layout.has_states:
        for name in ("state_dtype", "state_every", "state_share"):
            given = getattr(config, name)
            if given != SETTINGS[name].default:
                said = f'"{given}"' if isinstance(given, str) else given
                raise Unsupported(f"{name} is {said} and no layer of the model has a state: leave {name} out")
    check_weights(model, config, device)
    decoder = load_decoder(model, shape, config, device, max_len)
    for mixer in mixers:
        mixer.check_decoder(decoder)
    # without a state that was kept no prefix can begin
    prefixes = config.enable_prefix_caching and (config.state_share > 0 or not layout.has_states)
    load = PeakLoad(config.max_num_seqs, config.max_batched_tokens, paged=config.allocator == "paged", prefixes=prefixes)
    num_blocks, answers, kept = count_blocks(decoder, layout, mixers, config, load, max_len)
    load = replace(load, answers=answers, kept=kept)
    if config.max_model_len is None:
        max_len = min(max_len, num_blocks * config.block_size)
    caches = allocate_caches(decoder, layout, config, load, num_blocks)
    runner = Runner(
        decoder, caches, mixers, answers, max_len, graphs=not config.enforce_eager,
        deterministic=config.deterministic,
    )  # fmt: skip
    return Engine(
        runner,
        layout.pool(num_blocks, load, max_len),
        max_len=max_len,
        max_answers=answers,
        max_batched_tokens=config.max_batched_tokens,
        tokenizer=find_tokenizer(model, config),
        seed=config.seed,
        # else the keys that a request finds in the prefix cache would depend on the requests before it
        shares_answers=not runner.layers.separates_prompts,
        states=layout.state_rows(load),
        state_every=config.state_every,
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


def count_blocks(
    decoder: Decoder, layout: CacheLayout, mixers: Sequence[Mixer], config: EngineConfig, load: PeakLoad, max_len: int
) -> memory.Fit:
    """Returns how many blocks and states the caches get; one sequence of the asked length fits into the blocks."""
    size = config.block_size
    with current_device(decoder.embedding.device):
        fit = memory.what_fits(
            decoder, layout, mixers, config.cache_dtype(decoder.embedding.dtype), load,
            utilization=config.gpu_memory_utilization, longest=max_len, num_blocks=config.num_blocks,
            state_share=config.state_share,
        )  # fmt: skip
    if config.num_blocks is None:
        fit = fit._replace(blocks=min(fit.blocks, *(mixer.most_blocks for mixer in mixers)))
    if config.max_model_len is not None and fit.blocks * size < max_len:
        raise InvalidInput(
            f"{fit.blocks:,} blocks of {size} are room for {fit.blocks * size:,} tokens; a sequence may have "
            f"{max_len:,}: make num_blocks larger, or max_model_len smaller"
        )
    return fit


def allocate_caches(decoder: Decoder, layout: CacheLayout, config: EngineConfig, load: PeakLoad, num_blocks: int) -> Caches:
    """Allocates the memory of what the layers keep."""
    cached = config.cache_dtype(decoder.embedding.dtype)
    try:
        return layout.allocate(num_blocks, load, cached, decoder.embedding.device)
    except RuntimeError as error:
        taken = layout.page_bytes(num_blocks, cached, load) + layout.state_bytes(load)
        raise InvalidInput(
            f"no memory for a cache: {num_blocks:,} blocks (num_blocks) of {layout.block_bytes(cached):,} bytes take "
            f"{taken / 1e9:,.1f} GB{_states(layout, load)}"
        ) from error


def _states(layout: CacheLayout, load: PeakLoad) -> str:
    """Says which part of the caches is states, if any is."""
    rows = layout.state_rows(load)
    if rows is None:
        return ""
    return f", with {rows.total:,} states of {layout.states_in_words()}: make num_blocks or max_num_seqs smaller"


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
