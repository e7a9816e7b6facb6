"""The decoder's kernels compile for the chips that they are for, without one; rows stay in registers, 16 bytes a load."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

from tests.grids import pairs, swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_sampling_compiles import stack  # noqa: E402

WORDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def kernel_named(name: str):
    from rooftile.fused.kernels import gate_quantised, gated, linear, norm

    modules = {"_normalise": norm, "_gate": gated, "_linear": linear, "_gate_quantised": gate_quantised}
    return getattr(modules[name], name)


def compiled(name: str, sm: int, dtype: torch.dtype, constants: dict[str, object], even: bool = True, **words: str):
    """A kernel as it is launched for rows that are aligned to 16 bytes, or not."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernel_named(name)
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps")}
    others = {
        "gate_stride": "i32",
        "up_stride": "i32",
        "total": "i32",
        "x_stride_t": "i32",
        "x_stride_h": "i32",
        "eps": "fp32",
        "post_eps": "fp32",
    }
    signature = {
        argument: "constexpr" if argument in constants else (others | words).get(argument, WORDS[dtype])
        for argument in kernel.arg_names
    }
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    round_16 = [
        n for n, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr") or (even and argument in ("x_stride_t", "x_stride_h", "gate_stride", "up_stride"))
    ]  # fmt: skip
    source = ASTSource(kernel, signature, places, {(n,): [["tt.divisibility", 16]] for n in round_16})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def constants_of(kind: str, size: int, heads: int, residual: bool, post: bool) -> dict[str, object]:
    from rooftile.fused.kernels.norm import tile_of

    own = {"KIND": kind, "HEADS": heads, "SIZE": size, "RESIDUAL": residual, "POST": kind if post else ""}
    return tile_of(size) | own | {"OUT": "", "PDL": False}


NORMS = [
    ("rms", 4096, 1, True, False),
    ("rms", 2048, 1, False, False),
    ("rms", 128, 32, False, False),
    ("rms", 896, 1, True, False),
    ("plus one", 4608, 1, True, True),
    ("layer", 1600, 1, True, False),
    ("layer", 40, 3, False, False),
    ("rms", 16384, 1, True, False),
    ("rounds once", 4096, 1, False, False),
    ("layer", 16384, 1, True, False),
]
CHIPS = [(80, torch.bfloat16), (90, torch.bfloat16), (90, torch.float16), (90, torch.float32), (100, torch.bfloat16)]


def _traits(case: tuple) -> tuple:
    """`make test` compiles every problem on Hopper, where the stack is checked, and every dtype and chip with some problem."""
    sm, dtype, *problem = case
    return (sm == 90 and tuple(problem)), (sm, dtype), (dtype, problem[0])


@pytest.mark.parametrize(
    ("sm", "dtype", "kind", "size", "heads", "residual", "post"),
    swept([(*chip, *norm) for norm in NORMS for chip in CHIPS], _traits),
    ids=str,
)
def test_norms_compile(sm: int, dtype: torch.dtype, kind: str, size: int, heads: int, residual: bool, post: bool) -> None:
    constants = constants_of(kind, size, heads, residual, post)
    built = compiled("_normalise", sm, dtype, constants, even=size % 16 == 0)
    assert built.metadata.shared <= 1024
    # x, its weight, and what else there is
    wide = 2 + residual + post + (kind == "layer")
    if size % 16 == 0:
        assert len(re.findall(r"ld\.global\.v4\.b32", built.asm["ptx"])) >= wide
        assert len(re.findall(r"st\.global\.v4\.b32", built.asm["ptx"])) >= 1 + residual
    if sm == 90:
        assert stack(built) == 0


GATES = [
    (*chip, ffn, kind)
    for kind in ("silu", "tanh", "erf", "relu")
    for ffn in (14336, 4864, 7)
    for chip in CHIPS
    if chip[1] != torch.float16
]


@pytest.mark.parametrize(("sm", "dtype", "ffn", "kind"), swept(GATES, _traits), ids=str)
def test_gates_compile(sm: int, dtype: torch.dtype, ffn: int, kind: str) -> None:
    from rooftile.fused.kernels.tile import PIECE, warps_for

    piece = min(PIECE, triton.next_power_of_2(ffn))
    constants = {"FFN": ffn, "PIECE": piece, "KIND": kind, "PDL": False, "num_warps": warps_for(piece)}
    built = compiled("_gate", sm, dtype, constants)
    if ffn % 16 == 0:
        assert len(re.findall(r"ld\.global\.v4\.b32", built.asm["ptx"])) >= 2
        assert "st.global.v4.b32" in built.asm["ptx"]
    if sm == 90:
        assert stack(built) == 0


@pytest.mark.parametrize("out", ["fp8", "int8", "given"])
def test_quantising_norms_and_gates_compile(out: str) -> None:
    """A row in registers is quantised there: nothing of it is written in 16 bits."""
    from rooftile.fused.kernels import gate_quantised

    codes = "*i8" if out == "int8" else "*fp8e4nv"
    words = {"scales_ptr": "*fp32", "given_ptr": "*fp32"}
    norm = constants_of("rms", 4096, 1, True, False) | {"OUT": out}
    built = compiled("_normalise", 90, torch.bfloat16, norm, o_ptr=codes, **words)
    # only the stream is
    assert len(re.findall(r"st\.global\.v4\.b32", built.asm["ptx"])) <= 3
    assert stack(built) == 0
    gate = gate_quantised.constants_of(14336, "silu", out, torch.device("cpu"))
    assert stack(compiled("_gate_quantised", 90, torch.bfloat16, gate, codes_ptr=codes, **words)) == 0


SUMMED = [("rms", 4096, True, False), ("layer", 896, False, False), ("plus one", 5120, True, True), ("rms", 128, False, False)]


# aligned rows, or not
@pytest.mark.parametrize(
    ("norm", "dtype", "even"), swept(product(SUMMED, (torch.bfloat16, torch.float32), (True, False)), pairs), ids=str
)
def test_sums_of_a_norm_do_not_follow_from_how_it_is_written(norm: tuple, dtype: torch.dtype, even: bool) -> None:
    """The order of a sum follows from the layout of what is added, so codes and 16 bits have the same bits before."""
    kind, size, residual, post = norm
    found = []
    for out in ("", "fp8", "int8", "given"):
        constants = constants_of(kind, size, 1, residual, post) | {"OUT": out}
        codes = "*i8" if out == "int8" else "*fp8e4nv"
        words = {"o_ptr": codes, "scales_ptr": "*fp32", "given_ptr": "*fp32"} if out else {}
        text = compiled("_normalise", 90, dtype, constants, even=even, **words).asm["ttgir"]
        layouts = dict(re.findall(r"(#\w+) = (#ttg\.\w+<.*>)", text))
        reductions = re.findall(r'"tt\.reduce".*?\n(.*?)\}\) : \(tensor<[^#]*(#\w+)>\)', text, re.DOTALL)
        found.append([layouts[layout] for body, layout in reductions if "arith.addf" in body])
    assert found[0]
    assert found == [found[0]] * 4


@pytest.mark.parametrize(("sm", "dtype"), CHIPS, ids=str)
@pytest.mark.parametrize("out", [4096, 14336, 128256])
def test_products_compile(out: int, sm: int, dtype: torch.dtype) -> None:
    from rooftile.fused.kernels.linear import tile_of

    built = compiled("_linear", sm, dtype, tile_of(out, dtype) | {"OUT": out, "IN": 4096, "BIAS": False})
    assert built.metadata.shared <= 160 * 1024
    if dtype != torch.float32:
        # products of 16-bit numbers run on the matrix units
        assert re.search(r"wgmma|tcgen05\.mma" if sm >= 90 else r"mma\.sync", built.asm["ptx"])
        assert stack(built) == 0 or sm != 90


def test_every_activation_has_a_kernel() -> None:
    from rooftile.fused import ACTIVATIONS
    from rooftile.numerics.activations import KINDS

    assert KINDS.keys() == ACTIVATIONS.keys()


def test_places_are_of_64_bits() -> None:
    """Rows times their size may pass 2^31."""
    rows = compiled("_normalise", 90, torch.bfloat16, constants_of("rms", 128, 32, True, False))
    assert not re.search(r"arith\.(muli|addi) .*i32", rows.asm["ttir"])
    gates = compiled("_gate", 90, torch.bfloat16, {"FFN": 8192, "PIECE": 2048, "KIND": "silu", "PDL": False, "num_warps": 4})
    # a row's place in what is read, and in what is written
    assert len(re.findall(r"arith\.muli .*i64", gates.asm["ttir"])) == 2
