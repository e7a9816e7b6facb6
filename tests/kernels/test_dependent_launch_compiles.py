"""Kernels that begin beside the end of the one in front of them wait for it before they touch memory."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.runtime.dependent_launch import has_dependent_launches, overlaps  # noqa: E402
from tests.kernels import hopper_machine_code  # noqa: E402
from tests.kernels.test_decoder_kernels_compile import compiled, constants_of  # noqa: E402
from tests.kernels.test_experts_compile import compiled as compiled_experts  # noqa: E402
from tests.kernels.test_fused_gradients_compile import built  # noqa: E402
from tests.kernels.test_loki_compiles import compiled as compiled_pages  # noqa: E402
from tests.kernels.test_quantised_products_compile import compiled as compiled_rows  # noqa: E402
from tests.kernels.test_recurrent_steps_compile import compiled as compiled_step  # noqa: E402

NORM = constants_of("rms", 4096, 1, True, False)
GATE = {"FFN": 8192, "PIECE": 2048, "KIND": "silu", "PDL": False, "num_warps": 4}


def _quantising(pdl: dict[str, bool]) -> str:
    from rooftile.numerics import row_kernels

    constants = row_kernels.constants_of(4096, "fp8", False, torch.device("cpu")) | pdl
    return compiled_rows(row_kernels._quantise_rows, 90, constants, codes_ptr="*fp8e4nv", scales_ptr="*fp32").asm["ptx"]


def _gating_to_codes(pdl: dict[str, bool]) -> str:
    from rooftile.fused.kernels import gate_quantised

    constants = gate_quantised.constants_of(14336, "silu", "fp8", torch.device("cpu")) | pdl
    words = {"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "given_ptr": "*fp32"}
    return compiled("_gate_quantised", 90, torch.bfloat16, constants, **words).asm["ptx"]


def _choosing_pages(name: str, pdl: dict[str, bool]) -> str:
    from rooftile.approximate.loki import decoding_kernels as kernels

    device = torch.device("cpu")
    constants = {
        "_page_sums": kernels.constants_of(4, 32, 16, False, device), "_page_shares": kernels.shares_of(4, device),
        "_choose": kernels.chooses(8192, device),
    }  # fmt: skip
    return compiled_pages(getattr(kernels, name), 90, constants[name] | pdl)


def _routing(name: str, pdl: dict[str, bool]) -> str:
    from rooftile.moe import Router
    from rooftile.moe.kernels import few_tokens, routing

    device, sizes = torch.device("cpu"), (64, 6, 2048, 1408, 2816)
    kernel, constants = {
        "_logits": (routing._logits, routing.logits_constants(64, 2048, True, device)),
        "_choose": (routing._choose, routing.choice_constants(64, Router(active=6), 1e-20, True, device)),
        "_first": (few_tokens._first, few_tokens.first_constants(*sizes, "silu", False, torch.bfloat16, device)),
        "_second": (few_tokens._second, few_tokens.second_constants(*sizes, False, False, device)),
    }[name]
    return compiled_experts(kernel, constants | pdl, 90, torch.bfloat16).asm["ptx"]


def _gated_norm(pdl: dict[str, bool]) -> str:
    from rooftile.fused.kernels import gated_norm

    constants = gated_norm.forward_constants(5120, 1, True, False, torch.device("cpu")) | pdl
    return built(gated_norm._gated_norm, 90, constants).asm["ptx"]


def _one_token(name: str, pdl: dict[str, bool]) -> str:
    return compiled_step(name, 90, torch.bfloat16, torch.float32, **pdl).asm["ptx"]


KERNELS = {
    "norm": lambda pdl: compiled("_normalise", 90, torch.bfloat16, NORM | pdl).asm["ptx"],
    "gate": lambda pdl: compiled("_gate", 90, torch.bfloat16, GATE | pdl).asm["ptx"],
    "gate to codes": _gating_to_codes,
    "rows to codes": _quantising,
    "gated norm": _gated_norm,
    **{name: partial(_routing, name) for name in ("_logits", "_choose", "_second")},
    **{name: partial(_one_token, name) for name in ("_conv_step", "_ssd_step")},
    **{name: partial(_choosing_pages, name) for name in ("_page_sums", "_page_shares", "_choose")},
}


@pytest.mark.parametrize("name", KERNELS)
def test_they_wait_before_they_touch_memory(name: str) -> None:
    assert_waits(KERNELS[name]({"PDL": True}))
    assert "griddepcontrol" not in KERNELS[name]({"PDL": False})


def test_products_that_read_weights_early_wait_before_they_read_x_and_write() -> None:
    """`tests/gpu/test_decode_kernels.py` has the numbers of a chain of them."""
    from rooftile.fused.kernels import one_row

    pdl = {"PDL": True}
    row = compiled_experts(one_row._one_row, one_row.constants_of(2560, 512, True, torch.device("cpu")) | pdl, 90, torch.bfloat16)
    lines = row.asm["ptx"].splitlines()
    places = {
        what: [n for n, line in enumerate(lines) if re.search(what, line)]
        for what in ("launch_dependents", r"griddepcontrol\.wait", r"ld\.global", r"st\.global", r"%ctaid")
    }
    begins, waits, loads, stores, _ = places.values()
    # without permission it waits at once; with it when its rows are on their way
    assert len(begins) == 1
    assert len(waits) == 2
    assert begins[0] < waits[0] < loads[0] < waits[1] < loads[-1] < stores[0]
    # four rows of 512 numbers, 16 bytes for each of 64 threads; then x, of which a thread has 16 bytes, and the bias
    assert sum(n < waits[1] for n in loads) == 4
    for ptx in (_routing("_first", pdl),):
        lines = ptx.splitlines()
        waits = [n for n, line in enumerate(lines) if "griddepcontrol.wait" in line]
        assert len(waits) == 2
        assert min(n for n, line in enumerate(lines) if "ld.global" in line) > waits[0]


def assert_waits(ptx: str) -> None:
    """A kernel waits once, before it touches memory, and lets the next one begin before that."""
    lines = ptx.splitlines()
    (waits,) = [n for n, line in enumerate(lines) if "griddepcontrol.wait" in line]
    (begins,) = [n for n, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line]
    touches = [n for n, line in enumerate(lines) if re.search(r"\b(ld|st|atom|red)\.global", line)]
    # the next kernel waits for this one's end
    assert begins < waits < min(touches)


@pytest.mark.parametrize("name", ["decode-d128-pages-16-causal", "decode-fp8-d128-pages-16-causal"])
def test_decoding_waits_before_its_roles_part(name: str) -> None:
    lines = hopper_machine_code.ptx_of(hopper_machine_code.FORWARD[name]).splitlines()
    (waits,) = [n for n, line in enumerate(lines) if "griddepcontrol.wait" in line]
    # the other roles' warps begin at this barrier
    part = min(n for n, line in enumerate(lines) if re.match(r"\s*barrier\.sync\s+1;", line))
    touches = [n for n, line in enumerate(lines) if re.search(r"\b(ld|st)\.global|cp\.async", line)]
    assert waits < min(part, *touches)
    assert sum("griddepcontrol.launch_dependents" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("name", "due"), [("sm80", False), ("sm89", False), ("sm90", True), ("sm100", True), ("sm103", True), ("sm120", False),
                      ("gfx942", False), ("cpu", False)],
)  # fmt: skip
def test_who_has_such_launches(name: str, due: bool) -> None:
    assert has_dependent_launches(name) == due


def test_a_cpu_has_no_such_launches() -> None:
    assert overlaps(torch.device("cpu")) == {"PDL": False}
