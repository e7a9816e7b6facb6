"""The decoder's memory-bound kernels: bytes per second beside a copy, and beside the plain operations that define them.

In bf16, the L2 cache flushed before each call. `of_definition_ratio` is the time of the definition over the kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from rooftile.cost import memory_roof, traffic
from rooftile.cost.io import Traffic
from rooftile.cost.session import Session
from rooftile.fused import gated
from rooftile.fused.norm import add_norm, added_as_defined, normalise, normalised_as_defined
from rooftile.hardware.clock import Work, clock_for
from rooftile.models.config import ModelConfig
from rooftile.models.placement import Placement
from rooftile.models.projection import Norm
from rooftile.numerics.activations import gated_halves
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, times_of, with_measures
from rooftile_lab.bench.run import Progress

ROWS, HIDDEN, FFN = (1, 256, 8192), (2048, 4096), (8192, 14336)
# query heads, key heads, head dim
HEADS, KV_HEADS, DIM = 32, 8, 128
NORMS = ("norm", "add-norm", "add-layer-norm", "norm-add-norm")
GATES = {"gate-silu": "silu", "gate-gelu": "gelu_pytorch_tanh"}
GPU = (
    *(f"{what}-{rows}x{size}" for rows in ROWS for size in HIDDEN for what in NORMS),
    *(f"head-norm-{rows}x{HEADS * DIM}" for rows in ROWS),
    *(f"{what}-{rows}x{size}" for rows in ROWS for size in FFN for what in GATES),
)
CPU = ()
QUICK = tuple(case for case in GPU if "-256x" in case)
LLAMA = ModelConfig(
    family="llama", vocab_size=1, layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, max_len=1, scale=1.0,
    windows=(None,), rotary=None,
)  # fmt: skip
GEMMA = replace(LLAMA, norm_plus_one=True)
GPT2 = replace(LLAMA, norm="layer")


class Contest(NamedTuple):
    """A kernel, the operations that define it, and the bytes that must move."""

    moved: Traffic
    ours: Work
    defined: Work


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """Two rows per case: the kernel and its definition."""
    clock = clock_for(session.device, 12.0)
    for name in names:
        say(name)
        what, _, sizes = name.rpartition("-")
        rows, size = (int(word) for word in sizes.split("x"))
        with torch.inference_mode():
            one = contest_of(session.device, what, rows, size)
            found = contest(
                session, {"rooftile": one.ours, "definition": one.defined}, clock, suite="decoder", case=name, phase="fwd",
                roofs=memory_roof(one.moved, session.ceilings),
            )  # fmt: skip
        us = times_of(found)
        yield with_measures(found["rooftile"], of_definition_ratio=us["definition"] / us["rooftile"])
        yield found["definition"]


def contest_of(device: torch.device, what: str, rows: int, size: int) -> Contest:
    """One kernel on random numbers."""
    element = torch.bfloat16.itemsize
    if what in GATES:
        x = torch.randn(rows, 2 * size, device=device, dtype=torch.bfloat16)
        moved = traffic.gate(rows, size, element)
        return Contest(moved, partial(gated, x, GATES[what]), partial(gated_halves, x, GATES[what]))
    if what == "head-norm":
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device=device, dtype=torch.bfloat16)
        q, norm = qkv.unflatten(-1, (-1, DIM))[:, :HEADS], norm_of(LLAMA, DIM, device)
        moved = traffic.norm(rows * HEADS, DIM, element)
        return Contest(moved, partial(normalise, q, norm), partial(normalised_as_defined, q, norm))
    x, residual = torch.randn(2, rows, size, device=device, dtype=torch.bfloat16)
    if what == "norm":
        norm = norm_of(LLAMA, size, device)
        moved = traffic.norm(rows, size, element)
        return Contest(moved, partial(normalise, x, norm), partial(normalised_as_defined, x, norm))
    # a layer norm has a bias; Gemma's sum is normed before it is added, too
    config, weights = {"add-norm": (LLAMA, 1), "add-layer-norm": (GPT2, 2), "norm-add-norm": (GEMMA, 2)}[what]
    norm = norm_of(config, size, device)
    post = norm_of(config, size, device) if what == "norm-add-norm" else None
    moved = traffic.norm(rows, size, element, added=True, weights=weights)
    return Contest(moved, partial(add_norm, x, residual.clone(), norm, post), partial(added_as_defined, x, residual, norm, post))


def norm_of(config: ModelConfig, size: int, device: torch.device) -> Norm:
    """A norm with random weights."""
    norm = Norm(config, size, placement=Placement(torch.bfloat16, device))
    for weight in norm.parameters():
        weight.normal_()
    return norm
