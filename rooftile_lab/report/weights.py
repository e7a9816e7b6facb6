"""The experiment on weights: what the trained Llama weighs in each format, and what it loses.

Its own text is read again, so only the distance to the model in its own dtype says something. On a GPU each format also answers one
request with `rooftile.LLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rooftile.exact.spec import DTYPES
from rooftile.hardware import ceilings
from rooftile.hardware.ceilings import Ceilings
from rooftile.hardware.clock import clock_for, medians
from rooftile.weights import QuantisedWeight, quantise_weight
from rooftile.weights.linear import linear
from rooftile_lab.bench.learning.english import English
from rooftile_lab.bench.weighing import FORMATS, Weighed, nats_per_token, plain_bytes, quantised, tokens_per_second
from rooftile_lab.report.plan import Plan
from rooftile_lab.report.training import quiet

PIECES = 8
# rows of activations in the roofline: a decode step of one answer, to a prompt
ROWS = tuple(2**n for n in range(13))
# ... and the sizes of the products that are timed
TIMED = (1, 16, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The most FLOP/s that a product can reach over its rows, by the bytes of its weights and by arithmetic."""

    name: str
    points: tuple[tuple[int, float], ...]  # rows, FLOP/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The FLOP/s that a product reached here."""

    name: str  # the name of its roofline
    format: str  # the format of its weight
    rows: int
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The model in its own dtype, then in each format."""

    weighed: tuple[Weighed, ...]
    tokens_s: dict[str, float]  # for one request, on a GPU
    size: tuple[int, int]  # N and K of the product in the rooflines
    rooflines: tuple[Roofline, ...]
    reached: tuple[Reached, ...]


def measure(plan: Plan, folder: Path, device: str, step: Callable[[float, str], None]) -> Weights:
    """Weighs the checkpoint in a folder. Needs transformers."""
    from transformers import LlamaForCausalLM

    step(0.0, "the Llama in formats of few bits")
    dtype = torch.float32 if plan.device == "cpu" else torch.bfloat16
    with quiet():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    pieces = English.read(device).tests(PIECES, plan.model.length)
    size = (int(model.config.intermediate_size), int(model.config.hidden_size))
    words = [word for word in FORMATS if _fits(word, size)]
    found = [Weighed(plan.dtype, plain_bytes(model), nats_per_token(model, *pieces, rows=1))]
    speeds: dict[str, float] = {}
    for n, word in enumerate(words):
        step(n / len(words), f"the Llama in {word}")
        changed, nbytes = quantised(model, word)
        found.append(Weighed(word, nbytes, nats_per_token(changed, *pieces, rows=1)))
    if plan.device == "cuda":
        for word in ("auto", *words):
            step(0.9, f"an answer with weights in {word}")
            speeds[plan.dtype if word == "auto" else word] = tokens_per_second(folder, word, device)
    step(0.95, "products with its weights")
    return Weights(
        weighed=tuple(found), tokens_s=speeds, size=size, rooflines=rooflines(plan, ceilings.measure(device), size),
        reached=tuple(reached(plan, device, size)),
    )  # fmt: skip


def rooflines(plan: Plan, measured: Ceilings, size: tuple[int, int], rows: Sequence[int] = ROWS) -> tuple[Roofline, ...]:
    """The roofline of a product over its rows: in the model's dtype, with 8 bits, and with 4 bits in the weights."""
    rates = measured.rates(plan.dtype)
    element, (N, K) = DTYPES[plan.dtype].itemsize, size
    # a GPU multiplies 8 bits twice as fast; 4 bits are multiplied in the model's dtype
    faster = 2.0 if plan.device == "cuda" else 1.0
    found = []
    for name, of_weight, speed in ((plan.dtype, element, 1.0), ("8 bits", 1.0, faster), ("4 bits", 0.5, 1.0)):
        points = []
        for M in rows:
            flops, moved = 2.0 * M * N * K, of_weight * N * K + element * M * (N + K)
            points.append((M, flops / max(flops / (speed * rates.flops_per_s), moved / rates.bytes_per_s)))
        found.append(Roofline(name=name, points=tuple(points)))
    return tuple(found)


@torch.inference_mode()
def reached(plan: Plan, device: str, size: tuple[int, int]) -> Iterator[Reached]:
    """Times the product of each roofline with few rows and with many."""
    (N, K), dtype, clock = size, DTYPES[plan.dtype], clock_for(torch.device(device), 5.0)
    w = torch.randn(N, K, device=device, dtype=dtype) * K**-0.5
    group = next((group for group in (128, 64, 32) if K % group == 0), -1)
    weights: dict[tuple[str, str], Tensor | QuantisedWeight] = {
        (plan.dtype, plan.dtype): w, ("8 bits", "int8"): quantise_weight(w, "int8"),
        ("4 bits", "int4"): quantise_weight(w, "int4", group=group),
    }  # fmt: skip
    for rows in TIMED:
        x = torch.randn(rows, K, device=device, dtype=dtype)
        works = {names: partial(linear, x, weight) for names, weight in weights.items()}
        for work in works.values():
            work()
        for (name, format), us in medians(works, clock, rounds=2).items():
            yield Reached(name=name, format=format, rows=rows, flops_per_s=2e6 * rows * N * K / us)


def _fits(word: str, size: tuple[int, int]) -> bool:
    """Whether the groups of a format divide the rows of the model's weights."""
    group = int(word.partition(":")[2] or {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(word, 1))
    return all(n % group == 0 for n in size)
