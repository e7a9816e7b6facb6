"""The price of a bias: the same problem without one, with one, and with its gradient, beside PyTorch's memory-efficient kernel.

A case names the head dim, the mask, the bias's own axes and the length. Every problem has 16,384 tokens and 2,048 / D heads.
`of_plain_ratio` is the speed over the speed of Rooftile's kernels without a bias in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.errors import Unsupported
from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL, FULL, Mask
from rooftile.hardware.clock import Work, clock_for
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, times_of, with_measures
from rooftile_lab.bench.run import Progress, words_of

LENGTHS = {"2k": 2048, "8k": 8192, "tiny": 64}
GPU = tuple(
    f"d{dim}-{mask}-{axes}-{length}"
    for dim, mask, (axes, length) in product(
        (64, 128), ("full", "causal"), (("hts", "2k"), ("hts", "8k"), ("bhts", "2k"), ("bs", "2k"))
    )
)
CPU = ("d64-causal-hts-tiny",)
QUICK = ("d128-full-hts-2k",)
TOKENS = 16_384
Forward = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase: the forward, the backward, and the backward with the bias's gradient."""
    for name in names:
        case = problem(name)
        inputs = case.inputs(session.device, requires_grad=True)
        q, k, v = inputs.tensors
        bias = inputs.options["bias"]
        do = torch.randn_like(q)
        words = words_of(case.problem(session.machine.arch))
        for phase in ("fwd", "bwd", "bwd-dbias"):
            say(f"{name}: {phase}")
            wanted = (q, k, v, bias) if phase == "bwd-dbias" else (q, k, v)
            given = bias if phase == "bwd-dbias" else bias.detach()
            works: dict[str, Work] = {}
            for kind, forward in contestants(inputs.mask, session.device).items():
                if kind == "torch-efficient" and inputs.mask == CAUSAL:
                    # it takes a causal mask or a bias, and as a bias the mask would be written out
                    continue
                own = (q, k, v) if kind == "without" else wanted
                try:
                    works[kind] = work(forward, q, k, v, None if kind == "without" else given, do, own, phase)
                except Unsupported as refusal:
                    say(f"{name}: {kind}: {str(refusal).splitlines()[0]}")
            rows = contest(session, works, clock_for(session.device), dtype="bf16", suite="bias", case=name, phase=phase)
            us = times_of(rows)
            for kind, row in rows.items():
                named = replace(row, backend="rooftile" if kind == "with" else kind, problem=words)
                yield with_measures(named, of_plain_ratio=us["without"] / us[row.backend])


def problem(name: str) -> Case:
    """The problem of a case's name."""
    dim, mask, axes, length = name.split("-")
    size, T = int(dim[1:]), LENGTHS[length]
    tokens = TOKENS if T > 64 else 128
    return Case(
        name=name, tags=frozenset(), B=tokens // T, T=T, S=T, H=2048 // size, Hk=2048 // size, dim=size, dtype="bf16",
        mask=CAUSAL if mask == "causal" else FULL, bias=axes.upper(),
    )  # fmt: skip


def contestants(mask: Mask, device: torch.device) -> dict[str, Forward]:
    """Forwards of q, k, v and bias."""

    def of(backend: str | None) -> Forward:
        return lambda q, k, v, bias: rt.attention(q, k, v, mask, bias=bias, backend=backend)

    def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            whole = bias.expand(*q.shape[:3], k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=whole).transpose(1, 2)

    found = {"without": of(None), "with": of(None)}
    return found | ({"triton": of("triton"), "torch-efficient": efficient} if device.type == "cuda" else {})


def work(
    forward: Forward, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, do: Tensor, wanted: Sequence[Tensor], phase: str
) -> Work:  # fmt: skip
    """A phase of one contestant: the forward without gradients, or the backward on a kept graph."""
    if phase == "fwd":
        with torch.no_grad():
            forward(q, k, v, bias)

        def run() -> Tensor:
            with torch.no_grad():
                return forward(q, k, v, bias)

        return run
    o = forward(q, k, v, bias)
    return lambda: torch.autograd.grad(o, wanted, do, retain_graph=True)
