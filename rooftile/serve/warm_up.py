"""Kernels compiled before a first request waits for them, on a GPU: by running each once, on next to no memory.

The configuration is enough for that, so that it can be done while weights are read, in a few threads: the compiler spends most
of its time outside of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from rooftile.api import prepare_paged
from rooftile.backends import hopper
from rooftile.kvcache import PagedKV, Pages
from rooftile.kvcache.route import LONG_PROMPT, route
from rooftile.masks import Mask
from rooftile.models import Decoder, ModelConfig
from rooftile.serve.runner import masks_of
from rooftile.serve.sampling.sampler import SamplingFeatures, SamplingState, sample
from rooftile.spec import Asked

# tokens of prompts: so few that the kernels for prompts are not worth it, and usual ones
SHORT, USUAL = 8, 64
# of a step that decodes
ROWS = 16
# threads, at most: a kernel's first part is Python, and more of them keep the largest kernel waiting, which all wait for
THREADS = 4
# what samples want, mostly
FEATURES = (SamplingFeatures(chance=True), SamplingFeatures(chance=True, truncation=True))


@torch.inference_mode()
def compile_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, size: int, kv_dtype: torch.dtype, longest: int
) -> None:
    """All that steps without penalties and biases run.

    Args:
        config: of the model.
        dtype: of weights and computation.
        device: a GPU.
        size: tokens of a block of the cache.
        kv_dtype: of the cache.
        longest: tokens that are read of a prompt at once, at most.
    """
    import_kernels()
    with torch.cuda.device(device):
        # Triton's driver is made here, once
        import_module("triton").runtime.driver.active.get_current_target()
        work = jobs(config, dtype, device, size=size, kv_dtype=kv_dtype, longest=longest)
        with ThreadPoolExecutor(THREADS) as threads:
            for done in [threads.submit(_on, device, job) for job in work]:
                done.result()


def jobs(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, size: int, kv_dtype: torch.dtype, longest: int
) -> list[Callable[[], None]]:
    """What is run once, what takes longest first. What goes the same way is one job, so that nothing is compiled twice."""
    # a layer is like the others, and neither embedding nor head have kernels of ours
    small = replace(config, layers=1, windows=(None,), vocab_size=1, max_len=ROWS)
    decoder = Decoder(small, dtype=dtype, device=device)
    pages = Pages(1, 1, config.kv_heads, config.head_dim, size=size, dtype=kv_dtype, device=device)
    masks = tuple(dict.fromkeys(masks_of(config)))
    ways = {route(n, 1, size, fp8=kv_dtype == torch.float8_e4m3fn, copy_bytes=0).gather for n in (longest, USUAL)}
    together = [(longest,), (USUAL,)] if len(ways) > 1 else [(longest, USUAL)]
    return [
        *(partial(_read_prompts, decoder, pages, mask, lengths) for lengths in (*together, (SHORT,)) for mask in masks),
        *(partial(_read_prompts, decoder, pages, mask, (SHORT,), room=LONG_PROMPT) for mask in masks),
        partial(_decode_alone, decoder, pages, masks),
        partial(_decode_without_attention, decoder),
        *(partial(_sample, decoder, config.vocab_size, features) for features in FEATURES),
    ]


def import_kernels() -> None:
    """All that threads would import, by one: several that import the same at once get in each other's way."""
    for name in (
        "backends.triton.paged_decode", "backends.triton.paged_fwd", "kvcache.kernels", "fused.kernels.norm",
        "fused.kernels.gated",
    ):  # fmt: skip
        import_module(f"rooftile.{name}")
    import_module("rooftile.serve.sampling.kernels")
    hopper.import_kernels()


@torch.inference_mode()
def _on(device: torch.device, job: Callable[[], None]) -> None:
    """A thread begins on the first device, and without inference mode."""
    with torch.cuda.device(device):
        job()


def _read_prompts(decoder: Decoder, pages: Pages, mask: Mask, lengths: tuple[int, ...], *, room: int = 0) -> None:
    """Attention of prompts, all in the first block: what it says does not matter.

    Tables have room for more: what comes after a long text may be computed in another way, before anybody knows its length.
    """
    device = decoder.embedding.device
    for tokens in lengths:
        table = torch.zeros(1, -(-max(tokens, room) // pages.storage.shape[3]), dtype=torch.int32, device=device)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        q, _, _ = _projected(decoder, tokens)
        _see(decoder, mask, q.contiguous(), pages.view(0, table, ends[1:], ends))


def _decode_alone(decoder: Decoder, pages: Pages, masks: tuple[Mask, ...]) -> None:
    """Writing and attention of single tokens."""
    q, k, v = _projected(decoder, ROWS)
    nobody = torch.full((ROWS,), -1, device=decoder.embedding.device)
    q = pages.write_and_rotate(0, q, k, v, nobody, decoder.rotation(nobody.clamp(min=0)))
    table = torch.zeros(ROWS, 1, dtype=torch.int32, device=decoder.embedding.device)
    for mask in masks:
        _see(decoder, mask, q[:, None], pages.view(0, table, nobody.int() + 1))


def _decode_without_attention(decoder: Decoder) -> None:
    """The layers' rest."""
    rows = torch.zeros(ROWS, dtype=torch.int64, device=decoder.embedding.device)
    decoder(rows, rows, lambda layer, q, k, v, rotation: q)


def _sample(decoder: Decoder, vocabulary: int, features: SamplingFeatures) -> None:
    """The next tokens."""
    device = decoder.embedding.device
    rows = torch.zeros(ROWS, dtype=torch.int64, device=device)
    logits = torch.zeros(ROWS, vocabulary, dtype=decoder.embedding.dtype, device=device)
    if decoder.config.logit_softcap is not None:
        logits = logits.float()
    sample(logits, rows, rows, SamplingState(1, vocabulary, device), features)


def _projected(decoder: Decoder, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a layer projects them."""
    config = decoder.config
    heads = (config.heads, config.kv_heads, config.kv_heads)
    x = torch.zeros(tokens, sum(heads), config.head_dim, dtype=decoder.embedding.dtype, device=decoder.embedding.device)
    q, k, v = x.split(heads, dim=1)
    return q, k, v


def _see(decoder: Decoder, mask: Mask, q: Tensor, cache: PagedKV) -> None:
    config = decoder.config
    prepare_paged(q, cache, mask, asked=Asked(config.scale, config.softcap))(q, cache)
