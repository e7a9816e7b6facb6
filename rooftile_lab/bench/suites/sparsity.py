"""Products with 2:4 weights beside dense ones, and masks, compression and the transposable choice beside a copy.

    8b-FORMAT-rROWS         the four products of a layer of an 8B model, over more layers than the L2 cache holds
    square-FORMAT-rROWS     one product of 8192 x 8192
    small-FORMAT-rROWS      one product of 256 x 256, for a CPU
    WHAT-NxK                mask, transposable, compress, dense (a weight expanded) or pack (compressed by cuSPARSELt, in its own
                            layout), of one weight in 16 bits

Contestants of products are `rooftile`, each of its backends, the dense product of the same weight with its zeros (`bf16`,
`fp32` on a CPU; for FP8 also PyTorch's `_scaled_mm` with row scales, `torch-scaled-mm-rows`), PyTorch's semi-structured
tensors, and torchao's FP8 2:4 layer, where they run. x is in 16 bits: our FP8 products quantise it, and so does torchao's;
`rooftile-of-codes` is our product of an x that was quantised before, as the x of `torch-scaled-mm-rows` was. A peer is timed only
after its result was compared with the dense product; a row that is not timed says why. `of_bf16_ratio` is a time over the
dense product's in 16 bits, and `of_fp8_ratio` over dense FP8's. What moves memory has `of_copy_percent`: the rate of its
bytes over the rate of a copy of as many. On a GPU all are replays of CUDA graphs, in which nothing waits for a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import rooftile as rt
from rooftile.cost import Roof
from rooftile.cost.session import Session
from rooftile.hardware.clock import Work
from rooftile.numerics import quantise_rows
from rooftile.weights.two_four import TwoFour, compress, two_four
from rooftile.weights.two_four.product import cusparselt
from rooftile.weights.two_four.product.dispatch import NAMES
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, refused, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.suites.linear import LAYERS, MOST_ERROR, PRODUCTS
from rooftile_lab.bench.works import floor_of, graph_clock, words_of_error

FORMATS = ("bf16", "fp8")
ROWS = (1, 8, 16, 32, 64, 256, 8192)
SIZES = {"8b": PRODUCTS * LAYERS, "square": ((8192, 8192),), "small": ((256, 256),)}
PASSES = ("mask", "transposable", "compress", "dense")
PACK = "pack"
WEIGHTS = ("8192x8192", "28672x4096")
GPU = (
    *(f"8b-{format}-r{rows}" for format in FORMATS for rows in ROWS),
    *(f"square-{format}-r8192" for format in FORMATS),
    *(f"{what}-{size}" for what in (*PASSES, PACK) for size in WEIGHTS),
)
CPU = (*(f"small-{format}-r{rows}" for format in FORMATS for rows in (1, 16)), *(f"{what}-256x256" for what in PASSES))
QUICK = ("8b-bf16-r1", "8b-bf16-r64", "8b-fp8-r16", "square-bf16-r8192", "transposable-8192x8192")


class Case(NamedTuple):
    """Inputs of one case, its weights with zeros, and its 2:4 weights."""

    format: str
    inputs: list[Tensor]
    dense: list[Tensor]
    weights: list[TwoFour]


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant."""
    for name in names:
        say(name)
        with torch.inference_mode():
            yield from (_passes if name.partition("-")[0] in (*PASSES, PACK) else _products)(session, name)


def _products(session: Session, name: str) -> Iterator[Row]:
    case = case_of(name, session.device, session.dtype)
    works, why = contestants(case, session.dtype)
    named: dict[str, Any] = {"suite": "sparsity", "case": name, "phase": "fwd"}
    found = contest(session, works, graph_clock(session.device), roofs=roof_of(session, case), **named)
    us = times_of(found)
    for backend, row in found.items():
        measures = {"of_bf16_ratio": us[backend] / us[session.dtype]}
        if "torch-scaled-mm-rows" in us:
            measures["of_fp8_ratio"] = us[backend] / us["torch-scaled-mm-rows"]
        yield with_measures(row, **measures)
    yield from refused(session, why, **named)


def case_of(name: str, device: torch.device, dtype: str) -> Case:
    """Makes random inputs and 2:4 weights."""
    size, format, rows = name.split("-")
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    inputs, dense, weights = [], [], []
    for N, K in SIZES[size]:
        w = torch.randn(N, K, device=device, dtype=kind) * 0.02
        mask = two_four(w)
        w = torch.where(mask, w, 0)
        inputs.append(torch.randn(int(rows[1:]), K, device=device, dtype=kind))
        dense.append(w)
        codes = rt.quantise_weight(w, "fp8") if format == "fp8" else None
        weights.append(compress(w, mask) if codes is None else compress(codes.codes, mask, codes.scales))
    return Case(format, inputs, dense, weights)


def contestants(case: Case, dtype: str) -> tuple[dict[str, Work], dict[str, str]]:
    """Returns what is timed, and why the others are not."""
    pairs = list(zip(case.inputs, case.weights, strict=True))
    works: dict[str, Work] = {
        "rooftile": lambda: [rt.linear(x, w) for x, w in pairs],
        dtype: lambda: [functional.linear(x, w) for x, w in zip(case.inputs, case.dense, strict=True)],
    }
    if case.format == "fp8":
        made = [(quantise_rows(x, "fp8"), w) for x, w in pairs]
        works["rooftile-of-codes"] = lambda: [rt.linear(x, w) for x, w in made]
    why: dict[str, str] = {}
    for name in (one for one in NAMES if one != "definition"):
        try:
            rt.linear(*pairs[0], backend=name)
        except rt.Unsupported as error:
            why[name] = str(error)
        else:
            works[name] = _by(pairs, name)
    for name, (format, make) in PEERS.items():
        if case.format == format:
            work, reason = checked(case, make)
            if work is None:
                why[name] = reason
            else:
                works[name] = work
    return works, why


def _by(pairs: list[tuple[Tensor, TwoFour]], name: str) -> Work:
    return lambda: [rt.linear(x, w, backend=name) for x, w in pairs]


def checked(case: Case, make: Callable[[Case], Work]) -> tuple[Work | None, str]:
    """Returns a peer's work, if its results are near the dense product's; else why not."""
    try:
        work = make(case)
        found = work()
    # a peer is not ours: whatever stops it is its reason
    except Exception as error:
        return None, words_of_error(error)
    # FP8 differs by its rounding
    allowed = MOST_ERROR * (4 if case.format == "fp8" else 1)
    for y, x, w in zip(found, case.inputs, case.dense, strict=True):
        due = x.float() @ w.float().T
        share = float((y.float() - due).abs().mean() / due.abs().mean())
        if not share <= allowed:
            return None, f"its error is {share:.1%} of what is due; may be {allowed:.0%}"
    return work, ""


def _semi_structured(case: Case) -> Work:
    made = [torch.sparse.to_sparse_semi_structured(w) for w in case.dense]
    return lambda: [functional.linear(x, w) for x, w in zip(case.inputs, made, strict=True)]


def _scaled_mm(case: Case) -> Work:
    """Dense FP8 with row scales; x is quantised before, and not timed."""
    rows = [quantise_rows(x, "fp8") for x in case.inputs]
    weights = [rt.quantise_weight(w, "fp8") for w in case.dense]
    made = [(x.codes, w.codes.T, x.scales, w.scales.T.contiguous()) for x, w in zip(rows, weights, strict=True)]
    return lambda: [torch._scaled_mm(x, w, a, b, out_dtype=torch.bfloat16) for x, w, a, b in made]


def _torchao(case: Case) -> Work:
    """torchao's layer in FP8 with 2:4 weights; it quantises x."""
    ao = import_module("torchao.quantization")
    layers = []
    for w in case.dense:
        layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
        layer.weight = nn.Parameter(w, requires_grad=False)
        ao.quantize_(layer, ao.Float8DynamicActivationFloat8SemiSparseWeightConfig())
        layers.append(layer)
    return lambda: [layer(x) for layer, x in zip(layers, case.inputs, strict=True)]


# each with the format that it stands beside
PEERS: dict[str, tuple[str, Callable[[Case], Work]]] = {
    "torch-semi-structured": ("bf16", _semi_structured),
    "torch-scaled-mm-rows": ("fp8", _scaled_mm),
    "torchao-fp8": ("fp8", _torchao),
}


def roof_of(session: Session, case: Case) -> Roof:
    """The least time with the bytes of 2:4 weights; sparse arithmetic counts as twice as fast, and in FP8 as four times."""
    pairs = list(zip(case.inputs, case.weights, strict=True))
    flops = sum(2 * x.shape[0] * w.shape[0] * w.shape[1] for x, w in pairs)
    results = sum(x.shape[0] * w.shape[0] * x.element_size() for x, w in pairs)
    moved = sum(x.nbytes + w.nbytes for x, w in pairs) + results
    return floor_of(flops, moved, session.ceilings, session.dtype, faster=4 if case.format == "fp8" else 2)


def _passes(session: Session, name: str) -> Iterator[Row]:
    what, _, size = name.partition("-")
    N, K = (int(word) for word in size.split("x"))
    w = torch.randn(N, K, device=session.device).bfloat16()
    mask = two_four(w)
    weight = compress(w, mask)
    passes: dict[str, Work] = {
        "mask": partial(two_four, w), "transposable": partial(two_four, w, transposable=True),
        "compress": partial(compress, w, mask), "dense": weight.dense,
        PACK: partial(torch._cslt_compress, torch.where(mask, w, 0)),
    }  # fmt: skip
    whose = "library" if what == PACK else "rooftile"
    named: dict[str, Any] = {"suite": "sparsity", "case": name, "phase": "fwd"}
    if what == PACK and (reason := cusparselt.lack_of_library(session.device)):
        yield from refused(session, {whose: reason}, **named)
        return
    kept = weight.values.nbytes + weight.places.nbytes
    moved = w.nbytes + {"compress": mask.nbytes + kept, "dense": kept, PACK: kept}.get(what, mask.nbytes)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=session.device).random_()
    target = torch.empty_like(source)
    works: dict[str, Work] = {whose: passes[what], "copy": partial(target.copy_, source)}
    roof = floor_of(0, moved, session.ceilings, "bf16")
    found = contest(session, works, graph_clock(session.device), roofs=roof, **named)
    us = times_of(found)
    yield with_measures(found[whose], of_copy_percent=100 * us["copy"] / us[whose])
    yield found["copy"]
