"""Products with quantised weights beside PyTorch's in 16 bits, and beside PyTorch's own quantised products.

    8b-FORMAT-rROWS       the four products of a layer of an 8B model, over more layers than the L2 cache holds
    small-FORMAT-rROWS    one product of 256 x 256, for a CPU

On a GPU the products of a case are one CUDA graph. Contestants are `rooftile`, which quantises x where the format does, each of
its backends with x in codes, `bf16` (cuBLAS; fp32 on a CPU), PyTorch's `_scaled_mm` with one scale for a tensor and with scales
for rows and fast sums, `_int_mm` and `_weight_int4pack_mm`, FBGEMM's products in FP8 and INT4, and Humming's in INT4, where they
run. A peer has x as its product takes it, and is timed only after its result was compared with its own weights' product; a row
that is not timed says why. `of_bf16_ratio` is a time over 16 bits'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import rooftile as rt
from rooftile.cost import Roof
from rooftile.cost.session import Session
from rooftile.hardware.clock import Work
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.runtime.early_weights import weights_stay
from rooftile.weights import QuantisedWeight, weight_format
from rooftile.weights import dispatch as backends
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, refused, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, graph_clock, tidy, words_of_error

# N x K of an 8B model's layer: q, k and v; the output; gate and up; down
PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
# layers, so that weights come from memory
LAYERS = 3
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
FORMATS = ("fp8", "fp8_tile", "int8", "w8", "int4", "mxfp8", "mxfp4", "nvfp4")
GPU = tuple(f"8b-{format}-r{rows}" for format in FORMATS for rows in ROWS)
CPU = tuple(f"small-{format}-r{rows}" for format in FORMATS for rows in (1, 16))
QUICK = tuple(f"8b-{format}-r{rows}" for format in ("fp8", "int4") for rows in (1, 16, 256))
# the mean error of a peer's product, as a share of the mean of what is due
MOST_ERROR = 0.02


class Case(NamedTuple):
    """Inputs and weights of one case, and the inputs as the weights multiply them."""

    format: str
    inputs: list[Tensor]
    rows: Sequence[Tensor | QuantisedRows]
    plain: list[Tensor]
    weights: list[QuantisedWeight]


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant."""
    for name in names:
        say(name)
        # a clock keeps its graphs, and with them the results of all contestants
        clock = graph_clock(session.device)
        # an engine's graphs let weights be copied early, too
        with torch.inference_mode(), weights_stay():
            case = case_of(name, session.device, session.dtype)
            works, why = contestants(case)
            named: dict[str, Any] = {"suite": "linear", "case": name, "phase": "fwd"}
            found = contest(session, works, clock, roofs=roof_of(session, case), **named)
        us = times_of(found)
        for backend, row in found.items():
            yield with_measures(row, of_bf16_ratio=us[backend] / us[session.dtype])
        yield from refused(session, why, **named)
        del case, works, clock
        tidy(session.device)


def case_of(name: str, device: torch.device, dtype: str) -> Case:
    """Makes random inputs and weights."""
    size, format, rows = name.split("-")
    shapes = PRODUCTS * LAYERS if size == "8b" else ((256, 256),)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    inputs = [torch.randn(int(rows[1:]), K, device=device, dtype=kind) for _, K in shapes]
    plain = [torch.randn(N, K, device=device, dtype=kind) * 0.02 for N, K in shapes]
    codes = weight_format(format).activations
    made = inputs if codes is None else [quantise_rows(x, codes) for x in inputs]
    return Case(format, inputs, made, plain, [rt.quantise_weight(w, format) for w in plain])


def contestants(case: Case) -> tuple[dict[str, Work], dict[str, str]]:
    """Returns what is timed, and why the others are not."""
    dtype = "bf16" if case.plain[0].dtype == torch.bfloat16 else "fp32"
    works: dict[str, Work] = {
        "rooftile": lambda: [rt.linear(x, w) for x, w in zip(case.inputs, case.weights, strict=True)],
        dtype: lambda: [functional.linear(x, w) for x, w in zip(case.inputs, case.plain, strict=True)],
    }
    why: dict[str, str] = {}
    for name in backends.NAMES:
        if name == "definition":
            continue
        try:
            rt.linear(case.rows[0], case.weights[0], backend=name)
        except rt.Unsupported as error:
            why[name] = str(error)
        else:
            works[name] = _by(case, name)
    for name, (formats, make) in PEERS.items():
        if case.format in formats:
            work, reason = checked(case, make)
            if work is None:
                why[name] = reason
            else:
                works[name] = work
    return works, why


def _by(case: Case, name: str) -> Work:
    return lambda: [rt.linear(x, w, backend=name) for x, w in zip(case.rows, case.weights, strict=True)]


def checked(case: Case, make: Callable[[Case], tuple[Work, list[Tensor]]]) -> tuple[Work | None, str]:
    """Returns a peer's work, if its results follow from its weights; else why not."""
    try:
        work, due = make(case)
        found = work()
    # a peer is not ours: whatever stops it is its reason
    except Exception as error:
        return None, words_of_error(error)
    errors = [float((y.float() - z.float()).abs().mean() / z.float().abs().mean()) for y, z in zip(found, due, strict=True)]
    if not max(errors) <= MOST_ERROR:
        return None, f"its error is {max(errors):.1%} of what is due; may be {MOST_ERROR:.0%}"
    return work, ""


def _scaled_mm(case: Case) -> tuple[Work, list[Tensor]]:
    """FP8 with one scale for a tensor: x is quantised before, and not timed."""
    e4m3, one = torch.float8_e4m3fn, []
    for x, w in zip(case.inputs, case.plain, strict=True):
        x_scale, w_scale = x.abs().amax().float() / 448, w.abs().amax().float() / 448
        one.append(((x / x_scale).to(e4m3), (w / w_scale).to(e4m3).T, x_scale, w_scale))
    due = [(x.float() * a) @ (w.float() * b) for x, w, a, b in one]
    return lambda: [torch._scaled_mm(x, w, a, b, out_dtype=torch.bfloat16) for x, w, a, b in one], due


def _scaled_mm_rows(case: Case) -> tuple[Work, list[Tensor]]:
    """FP8 with scales for rows and sums that stay in the matrix units."""
    made = _by_rows(case)
    return lambda: [
        torch._scaled_mm(x, w.T, a, b.T, out_dtype=torch.bfloat16, use_fast_accum=True) for x, w, a, b in made
    ], _due_of_rows(made)


def _fbgemm(case: Case) -> tuple[Work, list[Tensor]]:
    """FP8 of FBGEMM (fbgemm-gpu-genai), with scales for rows."""
    made = _by_rows(case)
    run = fbgemm_operators().f8f8bf16_rowwise
    return lambda: [run(x, w, a.flatten(), b.flatten()) for x, w, a, b in made], _due_of_rows(made)


def _fbgemm_int4(case: Case) -> tuple[Work, list[Tensor]]:
    """INT4 of FBGEMM with our codes and scales: its codes are signed, and its kernel wants them shuffled."""
    operators = fbgemm_operators()
    made, due = [], []
    for x, w in zip(case.inputs, case.weights, strict=True):
        # a nibble of code + 8 with its highest bit turned is the code
        codes = (w.codes ^ 0x88).view(torch.int8)
        scales = w.scales.T.contiguous()  # (K / group, N)
        made.append((x, *operators.preshuffle_i4(codes, scales), torch.zeros_like(scales)))
        due.append(x.float() @ w.dequantise(x.dtype).float().T)
    return lambda: [operators.bf16i4bf16_shuffled(*each) for each in made], due


def fbgemm_operators() -> Any:
    """Returns the operators of fbgemm-gpu-genai."""
    import_module("fbgemm_gpu.experimental.gen_ai")
    return torch.ops.fbgemm


def _humming_int4(case: Case) -> tuple[Work, list[Tensor]]:
    """INT4 of Humming (humming-kernels[cu13]) with our codes and scales. It compiles its kernels when they are first used."""
    layer_of = import_module("humming.layer").HummingLayer
    made, due = [], []
    for x, w in zip(case.inputs, case.weights, strict=True):
        N, K = w.shape
        layer = layer_of(shape_n=N, shape_k=K, weight_config={"dtype": "uint4", "group_size": w.group}, torch_dtype=x.dtype).to(
            x.device
        )
        # words of eight codes with 8 added, the first in the lowest bits
        layer.load_from_tensors({"weight": w.codes.view(torch.int32), "weight_scale": w.scales})
        layer.transform()
        made.append((layer, x))
        due.append(x.float() @ w.dequantise(x.dtype).float().T)
    return lambda: [layer(x) for layer, x in made], due


def _by_rows(case: Case) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Codes of x and of the weight, and scales (M, 1) and (N, 1)."""
    rows = [quantise_rows(x, "fp8") for x in case.inputs]
    weights = [rt.quantise_weight(w, "fp8") for w in case.plain]
    return [(x.codes, w.codes, x.scales, w.scales.float()) for x, w in zip(rows, weights, strict=True)]


def _due_of_rows(made: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[Tensor]:
    return [(x.float() * a) @ (w.float() * b).T for x, w, a, b in made]


def _int_mm(case: Case) -> tuple[Work, list[Tensor]]:
    """INT8 without scales: codes are made before, and not timed."""
    pairs = [
        ((x * (127 / x.abs().amax())).round().to(torch.int8), w.codes.T) for x, w in zip(case.inputs, case.weights, strict=True)
    ]
    return lambda: [torch._int_mm(x, w) for x, w in pairs], [x.float() @ w.float() for x, w in pairs]


def _int4pack_mm(case: Case) -> tuple[Work, list[Tensor]]:
    """INT4 of PyTorch, in groups of 128, with codes of its own."""
    made, due = [], []
    for x, w in zip(case.inputs, case.plain, strict=True):
        groups = w.float().unflatten(1, (-1, 128))
        low, scale = groups.amin(-1), (groups.amax(-1) - groups.amin(-1)) / 15
        codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        zero = low + 8 * scale
        scales = torch.stack((scale, zero), -1).transpose(0, 1).contiguous().bfloat16()
        pairs = codes.flatten(1).to(torch.uint8)
        packed = torch._convert_weight_to_int4pack((pairs[:, ::2] << 4 | pairs[:, 1::2]).contiguous(), 8)
        made.append((x, packed, scales))
        weight = (codes - 8) * scale.bfloat16().float()[..., None] + zero.bfloat16().float()[..., None]
        due.append(x.float() @ weight.flatten(1).T)
    return lambda: [torch._weight_int4pack_mm(x, w, 128, s) for x, w, s in made], due


# each with the formats that it stands beside
PEERS: dict[str, tuple[tuple[str, ...], Callable[[Case], tuple[Work, list[Tensor]]]]] = {
    "torch-scaled-mm": (("fp8", "fp8_tile"), _scaled_mm),
    "torch-scaled-mm-rows-fast": (("fp8",), _scaled_mm_rows),
    "fbgemm-fp8": (("fp8",), _fbgemm),
    "torch-int-mm": (("int8",), _int_mm),
    "torch-int4": (("int4",), _int4pack_mm),
    "fbgemm-int4": (("int4",), _fbgemm_int4),
    "humming-int4": (("int4",), _humming_int4),
}


def roof_of(session: Session, case: Case) -> Roof:
    """The least time with the bytes of quantised weights; arithmetic in 8 bits counts as twice as fast."""
    flops = sum(2 * x.shape[0] * w.shape[0] * w.shape[1] for x, w in zip(case.inputs, case.weights, strict=True))
    results = sum(x.shape[0] * w.shape[0] * x.element_size() for x, w in zip(case.inputs, case.weights, strict=True))
    moved = sum(x.nbytes for x in case.inputs) + sum(w.nbytes for w in case.weights) + results
    faster = 2 if case.format in ("fp8", "fp8_tile", "int8") else 1
    return floor_of(flops, moved, session.ceilings, session.dtype, faster=faster)
