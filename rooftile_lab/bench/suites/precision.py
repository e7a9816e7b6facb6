"""Attention in FP8 and INT8 beside the fastest in 16 bits.

    fwd                 end to end, from and to 16 bits
    attention alone     on tensors that are quantised already
    quantise            quantising q, k and v alone: bytes per second beside a copy

`of_best_16_bit_ratio` is the time of the fastest contestant in 16 bits over this one's, `of_best_peer_ratio` the time of the
fastest peer: above 1 is faster than it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

import rooftile as rt
from rooftile.cost import Roof, flops, memory_roof, traffic
from rooftile.cost.session import Session
from rooftile.exact.cases import CASES as PROBLEMS
from rooftile.exact.cases import Case, Inputs
from rooftile.exact.masks import CAUSAL
from rooftile.hardware.clock import Work, clock_for
from rooftile.numerics.recipe import MEAN_OF
from rooftile_lab.bench.peers import provider_named
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, figures, times_of, with_measures
from rooftile_lab.bench.run import Progress, words_of

GPU = tuple(f"d{dim}-{mask}-{length}" for dim in (64, 128, 256) for mask in ("full", "causal") for length in ("1k", "4k", "16k"))
CPU = ("cpu-causal-256",)
QUICK = ("d128-full-4k", "d128-causal-16k")
PEERS = ("torch-cudnn", "fa4", "fa3")
PRECISIONS = ("fp8", "int8")


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    for name in names:
        say(name)
        case = PROBLEMS[name]
        problem = case.problem(session.machine.arch, needs_grad=False)
        inputs = case.inputs(session.device)
        works = contestants(session, case, inputs)
        # as many keys as the recipe's mean is taken of
        keys = len(range(0, case.S, max(case.S // MEAN_OF, 1)))
        moved = memory_roof(traffic.quantise(problem, keys_for_mean=keys), session.ceilings, case.dtype)
        floors: dict[str, Roof] = {word: moved for word in works if word.endswith(", quantise")}
        with torch.no_grad():
            rows = contest(
                session, works, clock_for(session.device, 12.0), dtype=case.dtype, roofs=floors, suite="precision", case=name,
                phase="fwd", problem=words_of(problem),
            )  # fmt: skip
        us = times_of(rows)
        in_16_bits = [us[word] for word in ("rooftile", *PEERS) if word in us]
        theirs = [us[word] for word in PEERS if word in us]
        for word, row in rows.items():
            backend, _, phase = word.partition(", ")
            row = replace(row, backend=backend, phase=phase or "fwd")
            if phase != "quantise":
                row = replace(row, tflops=figures(flops.count(problem) / us[word] / 1e6))
                row = with_measures(row, of_best_16_bit_ratio=min(in_16_bits) / us[word])
                if theirs:
                    row = with_measures(row, of_best_peer_ratio=min(theirs) / us[word])
            yield row


def contestants(session: Session, case: Case, inputs: Inputs) -> dict[str, Work]:
    """Calls by the names of their backends, and of their phases where these are not "fwd"."""
    q, k, v = inputs.tensors[:3]
    works: dict[str, Work] = {}
    for name in ("rooftile", *PEERS):
        provider = provider_named(name)
        if provider.reason(case, session.device, False) is None:
            works[name] = provider.prepare(case, inputs)
    for precision in PRECISIONS:
        qkv = rt.quantise_qkv(q, k, v, precision)
        works |= {
            precision: partial(rt.attention, q, k, v, inputs.mask, precision=precision),
            f"{precision}, quantise": partial(rt.quantise_qkv, q, k, v, precision),
            f"{precision}, attention alone": partial(rt.attention_quantised, qkv, inputs.mask),
        }
    if "fa3" in works:
        works["fa3 fp8, attention alone"] = flash_attention_3(case, inputs)
    return works


def flash_attention_3(case: Case, inputs: Inputs) -> Work:
    """FlashAttention-3 on q, k and v in FP8, with one scale for each key head of a sequence, as it takes them."""
    flash_attn_func = import_module("flash_attn_interface").flash_attn_func
    codes, scales = zip(*(in_fp8(x, case.Hk) for x in inputs.tensors[:3]), strict=True)
    options = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    return partial(flash_attn_func, *codes, softmax_scale=case.scale, causal=case.mask == CAUSAL, **options)


def in_fp8(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x (B, T, H, D), and the scale (B, heads) of each group of H / heads heads."""
    grouped = x.unflatten(2, (heads, -1))  # (B, T, heads, H / heads, D)
    scale = grouped.abs().amax((1, 3, 4)).float() / torch.finfo(torch.float8_e4m3fn).max
    return (grouped / scale[:, None, :, None, None]).to(torch.float8_e4m3fn).flatten(2, 3), scale
