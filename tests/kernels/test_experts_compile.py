"""The experts' kernels compile for the chips that they are for, without one; no register spills."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from tests.grids import pairs, swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402
from tests.kernels.test_sampling_compiles import stack  # noqa: E402

# bytes outside of registers
ROOM = 32 if NEWER else 0
WORDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS = dict.fromkeys(("from_ptr", "to_ptr", "tokens_ptr", "order_ptr"), "*i64")
POINTERS |= dict.fromkeys(("bounds_ptr", "chosen_ptr", "counts_ptr", "experts_ptr", "totals_ptr"), "*i32")
POINTERS |= dict.fromkeys(("gates_ptr", "g_ptr", "dg_ptr", "z_ptr", "scores_ptr"), "*fp32")
SCALARS = dict.fromkeys(("TILES", "ROWS", "COUNTED", "N", "early"), "i32") | {"scale": "fp32"}
E, D, H = 64, 2048, 1408
CPU = torch.device("cpu")


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    sm: int,
    dtype: torch.dtype,
    pointers: dict[str, str] | None = None,
    room: int = ROOM,
    multiples: tuple[str, ...] = (),
) -> Any:
    """A kernel as it is launched for tensors that are aligned to 16 bytes, with sizes that are `multiples` of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    known = POINTERS | (pointers or {})
    options = {word: constants.pop(word) for word in ("num_warps", "num_stages") if word in constants}
    signature = {
        name: "constexpr" if name in constants else SCALARS.get(name) or known.get(name, WORDS[dtype])
        for name in kernel.arg_names
    }
    names = list(enumerate(kernel.arg_names))
    places = {(n,): constants[name] for n, name in names if name in constants}
    even = {(n,): [["tt.divisibility", 16]] for n, name in names if name.endswith("_ptr") or name in multiples}
    built = triton.compile(ASTSource(kernel, signature, places, even), target=GPUTarget("cuda", sm, 32), options=options)
    assert built.metadata.shared <= (227 if sm == 90 else 163) * 1024
    assert stack(built) <= room
    return built


def runs_on_matrix_units(built: Any, sm: int, rows: int) -> bool:
    return bool(re.search(r"wgmma" if sm >= 90 and rows >= 64 else r"mma\.sync|wgmma", built.asm["ptx"]))


ROWS = (16, 32, 64, 128)
ACTIVATIONS = ("silu", "clamped", "relu2", "none")
GRID = [
    (sm, dtype, rows, activation)
    for sm in (80, 90)
    for dtype in WORDS
    for rows in ROWS
    for activation in ACTIVATIONS
    if rows <= (32 if dtype == torch.float32 else 128)
]


def _traits(case: tuple) -> tuple:
    """`make test` compiles every tile for Hopper in bf16, where it must be fast, and every chip and dtype with some tile."""
    sm, dtype, rows, activation = case
    return (sm == 90 and dtype == torch.bfloat16 and activation in ("silu", "none") and (rows, activation)), (sm, dtype)


@pytest.mark.parametrize(("sm", "dtype", "rows", "activation"), swept(GRID, _traits), ids=str)
def test_products_compile(sm: int, dtype: torch.dtype, rows: int, activation: str) -> None:
    from rooftile.moe.kernels.products import _product
    from rooftile.moe.kernels.tiles import Way, product_constants

    sizes = (H, D) if activation == "none" else (D, H)
    is_first = activation != "none"
    way = Way(gather=is_first, scatter=not is_first, alone=rows == 16)
    constants = product_constants(E, *sizes, activation, dtype, sm >= 90, rows, activation in ("clamped", "none"), is_first, way)
    built = compiled(_product, constants, sm, dtype)
    assert dtype != torch.bfloat16 or runs_on_matrix_units(built, sm, rows)


BACKWARD = [(sm, dtype, rows, gather) for sm, dtype, rows, way in GRID if way == "none" for gather in (False, True)]


@pytest.mark.parametrize(("sm", "dtype", "rows", "gather"), swept(BACKWARD, lambda case: (case[:2], case[2:])), ids=str)
def test_products_of_the_backward_compile(sm: int, dtype: torch.dtype, rows: int, gather: bool) -> None:
    from rooftile.moe.kernels.products import _product
    from rooftile.moe.kernels.tiles import Way, product_constants

    sizes = (D, H) if gather else (2 * H, D)
    constants = product_constants(E, *sizes, "none", dtype, sm >= 90, rows, False, False, Way(gather, not gather, turned=True))
    built = compiled(_product, constants, sm, dtype)
    assert dtype != torch.bfloat16 or runs_on_matrix_units(built, sm, rows)


@pytest.mark.parametrize(("left_by_token", "dtype", "sm"), swept(product((False, True), WORDS, (80, 90)), pairs), ids=str)
def test_weight_gradients_compile(left_by_token: bool, dtype: torch.dtype, sm: int) -> None:
    from rooftile.moe.kernels.gradients import _bias_gradient, _weight_gradient
    from rooftile.moe.kernels.tiles import bias_constants, weight_constants

    sizes = (D, H) if left_by_token else (2 * H, D)
    built = compiled(_weight_gradient, weight_constants(*sizes, left_by_token, dtype, sm >= 90), sm, dtype)
    assert dtype == torch.float32 or runs_on_matrix_units(built, sm, 64)
    compiled(_bias_gradient, bias_constants(sizes[0], left_by_token), sm, dtype)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("activation", ["silu", "clamped", "relu2"])
def test_activations_and_sorting_compile(activation: str, sm: int) -> None:
    from rooftile.moe.kernels import tiles
    from rooftile.moe.kernels.activations import _activate, _activate_backward
    from rooftile.moe.kernels.sorting import (
        _add_counts,
        _count_rows,
        _place_rows,
        adding_constants,
        count_constants,
        place_constants,
    )

    bias = activation == "clamped"
    constants = tiles.activation_gradient_constants(E, H, D, activation, gated=True, routed=True, bias=bias, keep=True)
    compiled(_activate_backward, constants, sm, torch.bfloat16)
    compiled(_activate, tiles.activation_constants(H, activation), sm, torch.bfloat16)
    for experts in (8, 512):
        compiled(_count_rows, count_constants(experts), sm, torch.bfloat16)
        compiled(_add_counts, adding_constants(experts), sm, torch.bfloat16)
    for experts, few in ((512, None), (8, 1), (512, 8), (E, 1024)):
        compiled(_place_rows, place_constants(experts, 6, few), sm, torch.bfloat16)


# experts, width and router of published models
ROUTERS = {
    "deepseek-16b": (64, 2048, {"active": 6}),
    "mixtral": (8, 4096, {"active": 2, "normalise": True}),
    "qwen3-30b": (128, 2048, {"active": 8, "normalise": True, "round_gates": True}),
    "gpt-oss": (32, 2880, {"active": 4, "score": "chosen softmax"}),
    "v2": (160, 5120, {"active": 6, "groups": 8, "active_groups": 3, "scale": 16.0}),
    "v3": (
        256, 7168,
        {
            "active": 8, "groups": 8, "active_groups": 4, "group_score": "sum of best two", "score": "sigmoid",
            "normalise": True, "scale": 2.5,
        },
    ),
    "largest": (1024, 16384, {"active": 16}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sm", "bias", "dtype"),
    swept(
        product(ROUTERS, (80, 90), (False, True), (torch.bfloat16, torch.float32)),
        lambda case: (case[:2], case[::2], case[1:3], case[2:]),
    ),
    ids=str,
)
def test_routers_compile(name: str, sm: int, bias: bool, dtype: torch.dtype) -> None:
    from rooftile.moe import Router
    from rooftile.moe.kernels.routing import _choose, _logits, choice_constants, logits_constants

    experts, d, words = ROUTERS[name]
    compiled(_logits, logits_constants(experts, d, bias, CPU), sm, dtype)
    compiled(_choose, choice_constants(experts, Router(**words), 1e-20, bias, CPU), sm, torch.bfloat16)


# experts, choices, width, hidden sizes of experts and of the shared network
MODELS = {
    "deepseek-16b": (64, 6, 2048, 1408, 2816), "mixtral": (8, 2, 4096, 14336, 0), "qwen3-next": (512, 10, 2048, 512, 512),
    "v3": (256, 8, 7168, 2048, 2048), "gpt-oss": (32, 4, 2880, 2880, 0),
}  # fmt: skip


FEW = [
    *((name, "silu", torch.bfloat16) for name in MODELS),
    ("gpt-oss", "clamped", torch.bfloat16), ("qwen3-next", "clamped", torch.float16), ("deepseek-16b", "relu2", torch.bfloat16),
    ("deepseek-16b", "silu", torch.float32), ("gpt-oss", "silu", torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sm", "name", "activation", "dtype"),
    swept([(sm, *case) for sm in (80, 90) for case in FEW], lambda case: [case] if case[0] == 90 else (case[::2], case[::3])),
    ids=str,
)
def test_experts_of_few_tokens_compile(sm: int, name: str, activation: str, dtype: torch.dtype) -> None:
    from rooftile.moe.kernels.few_tokens import _first, _second, first_constants, second_constants

    sizes, full = MODELS[name], activation == "clamped"
    compiled(_first, first_constants(*sizes, activation, full, dtype, CPU), sm, dtype)
    compiled(_second, second_constants(*sizes, full, full and sizes[-1] > 0, CPU), sm, dtype)


ONE_ROW = ((10576, 2560), (2560, 5120), (6144, 2048), (7168, 16384), (64, 12), (4096, 14336))


@pytest.mark.parametrize(
    ("sizes", "sm", "dtype"), swept(product(ONE_ROW, (80, 90), (torch.bfloat16, torch.float16)), pairs), ids=str
)
def test_products_of_one_row_compile(sizes: tuple[int, int], sm: int, dtype: torch.dtype) -> None:
    from rooftile.fused.kernels.one_row import STEPS, _one_row, constants_of, steps

    out, inner = sizes
    assert steps(inner) <= STEPS
    compiled(_one_row, constants_of(out, inner, dtype == torch.float16, CPU), sm, dtype)


QUANTISED = [
    (sm, word, rows, activation)
    for sm in (80, 90)
    for word in ("fp8", "w8", "int4", "mxfp4", "mxfp8", "nvfp4")
    for rows in ROWS
    for activation in ("silu", "clamped", "relu2", "none")
]


def _quantised_traits(case: tuple) -> tuple:
    sm, word, rows, activation = case
    hopper = sm == 90 and word in ("fp8", "mxfp4") and activation in ("silu", "none")
    return (hopper and (word, rows)), (hopper and (rows, activation)), (sm, word)


@pytest.mark.parametrize(("sm", "word", "rows", "activation"), swept(QUANTISED, _quantised_traits), ids=str)
def test_products_with_quantised_weights_compile(sm: int, word: str, rows: int, activation: str) -> None:
    from rooftile.moe.kernels.quantised import _quantised_product, depth_of, quantised_constants
    from rooftile.moe.kernels.tiles import Way
    from rooftile.weights import quantise_weight
    from rooftile.weights.triton.unpacked import weight_of

    K, out = (1408, 2048) if activation == "none" else (2048, 1408)
    weight = quantise_weight(torch.randn(2, K), word)
    kind = weight_of(weight.parts, weight.format, weight.group, (E * 2 * out, K), depth_of(weight, rows, torch.bfloat16))
    way = Way(gather=activation != "none", scatter=activation == "none", alone=rows == 16)
    constants = quantised_constants(E, out, activation, torch.bfloat16, rows, activation == "clamped", way, kind)
    scales = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}.get(weight.scales.dtype, "*u8")
    codes = "*i8" if weight.codes.dtype == torch.int8 else "*u8"
    pointers = {"codes_ptr": codes, "scales_ptr": scales, "zeros_ptr": codes, "outer_ptr": "*fp32"}
    # codes, numbers and two sums at once: some ten registers of a tile leave for the stack, outside of the loop's products
    built = compiled(_quantised_product, constants, sm, torch.bfloat16, pointers, room=64)
    assert runs_on_matrix_units(built, sm, rows)
