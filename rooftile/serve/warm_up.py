"""Kernels compiled before a first request waits for them, on a GPU.

Several threads compile, each by running what it is to compile: most of that time is spent outside of Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from rooftile.api import paged_alike
from rooftile.masks import Mask
from rooftile.serve.runner import Runner

# tokens of a prompt so short that it goes another way than a whole step of them
SHORT = 8


def compile_kernels(runner: Runner, max_batched_tokens: int) -> None:
    """All that steps without penalties, truncation and the like run; a cache of one block is enough for it."""
    jobs: list[Callable[[], None]] = [
        partial(_read_prompt, runner, mask, tokens)
        for mask in dict.fromkeys(runner.masks)
        for tokens in (max_batched_tokens, SHORT)
    ]
    with ThreadPoolExecutor(min(len(jobs) + 1, os.cpu_count() or 1)) as threads:
        running = [threads.submit(_on, runner.device, job) for job in (*jobs, runner.decode_once)]
        for one in running:
            one.result()


@torch.inference_mode()
def _on(device: torch.device, job: Callable[[], None]) -> None:
    """A thread begins on the first device, and without inference mode."""
    with torch.cuda.device(device):
        job()


def _read_prompt(runner: Runner, mask: Mask, tokens: int) -> None:
    """Attention of a prompt, all in the first block: what it says does not matter."""
    config, size = runner.decoder.config, runner.pages.storage.shape[3]
    table = torch.zeros(1, -(-tokens // size), dtype=torch.int32, device=runner.device)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=runner.device)
    q = torch.zeros(tokens, config.heads, config.head_dim, dtype=runner.decoder.embedding.dtype, device=runner.device)
    cache = runner.pages.view(0, table, ends[1:], ends)
    paged_alike(q, cache, mask, scale=config.scale, softcap=config.softcap)(q, cache)
