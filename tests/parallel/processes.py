"""Runs a function in P processes over gloo or NCCL, and returns what each rank returned."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# a hang ends a test, and not the machine's patience
SECONDS = 240


def run_on(ranks: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Calls function(rank, *arguments) in each of `ranks` processes; an error of a rank is raised here. NCCL: a GPU each."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_main, args=(rank, ranks, folder, backend, function, arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        answers = [
            torch.load(path, weights_only=False) if (path := Path(folder) / f"{rank}.pt").exists() else None
            for rank in range(ranks)
        ]
    errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer and "error" in answer]
    assert not errors, "\n".join(errors)
    assert not hung, f"ranks {hung} had not ended after {SECONDS} s"
    assert all(answer is not None for answer in answers), "a rank ended without an answer"
    return [answer["found"] for answer in answers]


def _main(
    rank: int, ranks: int, folder: str, backend: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        answer = {"found": function(rank, *arguments)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    torch.save(answer, Path(folder) / f"{rank}.pt")
    if "found" in answer:
        dist.destroy_process_group()
