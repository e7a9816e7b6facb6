"""Every Hopper configuration we ship compiles without a GPU, on the oldest and the newest Triton that we know.

`make tables` writes what they compile to into docs/reference/hopper-kernels.md, so that a regression shows in review.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.grids import swept  # noqa: E402
from tests.kernels.hopper_machine_code import BACKWARD, CONFIGURATIONS, FORWARD, Configuration, compiled  # noqa: E402
from tests.kernels.newer import NEWER  # noqa: E402
from tests.kernels.register_flow import overwritten_operands, undefined_reads  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/hopper-kernels.md"
# scripts/setup.sh puts it there
NEWEST = Path(sys.prefix) / "triton-3.9"
SHARED = 227 * 1024
# bytes outside registers, none of them in a loop over blocks: what lives across the rare walk with care
STACK = 128


def _traits(name: str) -> list:
    """`make test` compiles each kernel with each of its layouts and options, and each head dim forward and backward."""
    c = CONFIGURATIONS[name]
    part = "backward" if name in BACKWARD else c.kernel
    own = [(part, field, getattr(c, field)) for field in ("layout", "extras", "precision")]
    own += [(part, "has a bias", bool(c.bias)), ("bias", c.bias), (c.kernel, c.add), (part, c.size > 0)]
    return [*own, (part == "backward", c.kernel == "flash_fwd", c.dim)]


GRID = swept(CONFIGURATIONS, _traits)


@pytest.mark.parametrize("name", GRID)
def test_configuration_fits_the_chip_and_keeps_its_loops_in_registers(name: str) -> None:
    kernel = compiled(CONFIGURATIONS[name])
    assert kernel.shared <= SHARED
    # a word or two outside registers in the backward's loop under a mask, and where integers become numbers; more with every
    # option at once, and some with a bias or with bits, which a branch reads that few blocks take
    everything, integers = "everything" in name, name.startswith("int8")
    backward = name in BACKWARD
    bias, bits = "bias" in name, "bits" in name
    if backward:
        spills = 48 if everything else 20 if bias or bits else 10
    else:
        spills = 14 if integers or (everything and bits) else 5 if everything else 0
    assert kernel.hot_spills <= spills + (3 if NEWER and spills else 0)
    assert kernel.stack <= (STACK + 64 if everything or integers or bias else STACK)
    assert kernel.products > 0, "no wgmma"
    assert kernel.undefined == 0, "ptxas reads registers that nothing wrote"
    assert kernel.overwritten == 0, "ptxas overwrites in the loop what its products hold in registers"
    assert not kernel.serialised, "ptxas takes the matrix products one by one (a C75xx warning)"


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the page was written with Triton 3.6")
@pytest.mark.parametrize("name", GRID)
def test_page_says_what_the_configuration_compiles_to(name: str) -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    kernel = compiled(CONFIGURATIONS[name])
    cells = [cell.strip().replace(",", "") for cell in row.strip("|").split("|")[1:]]
    assert cells == [str(n) for n in (kernel.registers, kernel.stack, kernel.shared, kernel.loop, kernel.products)], (
        "what the kernel compiles to has changed: `make tables` rewrites the page"
    )


@pytest.mark.skipif(not NEWEST.exists(), reason="Triton 3.9 could not be installed when this environment was made")
@pytest.mark.parametrize(
    "names",
    [
        ["bwd-d64-causal"],
        pytest.param(["d64-full-3", "d128-causal", "d128-everything", "d256-packed-causal", "decode-d128-pages-16-causal",
                      "d128-pages-16-packed-causal", "bwd-q-d256-full", "decode-fp8-d128-pages-16-causal",
                      "bwd-ordered-d64-full", "bwd-d128-full", "bwd-kv-d256-causal"], marks=pytest.mark.sweep),
    ],
    ids=["some", "others"],
)  # fmt: skip
def test_newest_triton_compiles_the_kernels(names: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(NEWEST), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper_machine_code", *names],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [kernel["name"] for kernel in kernels] == names
    for kernel in kernels:
        assert kernel["triton"].startswith("3.9.")
        assert kernel["shared"] <= SHARED
        # the tiles were chosen with Triton 3.6
        assert kernel["hot_spills"] <= (80 if kernel["name"] in BACKWARD else 8)
        assert kernel["products"] > 0
        assert kernel["undefined"] == 0
        assert kernel["overwritten"] == 0
        assert not kernel["serialised"]


WORDS = {"D": 128, "DIM": 96, "DO": True, "DLSE": True, "SINKS": True, "CHECK_NAN": True, "FAR": 8192.0}


# as `launch_8bit` has it
QUANTISE = {"GROUP": 4, "ROTATE": True, "SMOOTH": True}


@pytest.mark.parametrize(
    ("module", "name", "constants"),
    [
        ("quantised.quantise", "mean_keys", {"D": 64, "PACKED": False}),
        ("quantised.quantise", "mean_keys", {"D": 128, "PACKED": True}),
        ("quantised.quantise", "quantise", QUANTISE | {"D": 64, "DV": 64, "PACKED": False, "INTEGER": False}),
        ("quantised.quantise", "quantise", QUANTISE | {"D": 128, "DV": 128, "PACKED": True, "INTEGER": True}),
        ("quantised.quantise", "quantise", QUANTISE | {"D": 256, "DV": 256, "PACKED": False, "INTEGER": False}),
        ("flash_bwd.row_stats", "compute_row_stats", WORDS | {"PACKED": False, "BIAS": True, "SUM": 128}),
        ("flash_bwd.row_stats", "compute_row_stats", WORDS | {"PACKED": True, "BIAS": False, "SUM": 0}),
        ("flash_bwd.row_stats", "compute_row_stats", WORDS | {"PACKED": False, "BIAS": False, "SUM": 128, "FAR": float("inf")}),
        ("flash_bwd.dq_accumulator", "finalize_dq", {"D": 128, "DIM": 96, "PACKED": False, "CHECK_NAN": True}),
        ("flash_bwd.dq_accumulator", "finalize_dq", {"D": 64, "DIM": 64, "PACKED": True, "CHECK_NAN": False}),
    ],
    ids=str,
)
def test_kernels_before_and_after_the_products_compile(module: str, name: str, constants: dict[str, int]) -> None:
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from rooftile.exact.backends.hopper.tma import layout

    kernel = getattr(import_module(f"rooftile.exact.backends.hopper.{module}"), name)
    kinds = dict.fromkeys(("o_ptr", "do_ptr", "dq_ptr", "k_ptr"), "*bf16") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("stats_ptr", "rests_ptr"), "*i64")
    kinds |= dict.fromkeys(("nan_flag_ptr", "cu_ptr"), "*i32") | dict.fromkeys(constants, "constexpr")
    dim = constants.get("D", 64)
    codes = (torch.int8, "i8") if constants.get("INTEGER") else (torch.float8_e4m3fn, "fp8e4nv")
    kinds |= dict.fromkeys(("q_out_ptr", "k_out_ptr"), f"*{codes[1]}") | dict.fromkeys(("cu_q_ptr", "cu_k_ptr"), "*i32")
    for desc, box, dtype, word in (
        *((desc, (1, 128, dim), torch.bfloat16, "bf16") for desc in ("q_desc", "k_desc", "v_desc")),
        *((desc, (1, 128, dim), *codes) for desc in ("q_out_desc", "k_out_desc")),
        ("v_out_desc", (1, dim, 128), torch.float8_e4m3fn, "fp8e4nv"),
    ):
        kinds[desc] = f"tensordesc<{word}{[1, *box]},{layout((1, *box), dtype)!r}>"
    options = {"num_warps": 4 * dim // 64, "maxnreg": 128} if name == "quantise" else {"num_warps": 4}
    signature = {arg: kinds.get(arg, "*fp32" if arg.endswith("_ptr") else "i32") for arg in kernel.arg_names}
    places = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.asm["cubin"]
    assert "st.local" not in built.asm["ptx"]


LOOPS = """
        /*0000*/                   UMOV UR4, URZ ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
        /*0020*/                   UIADD3 UR40, UP0, UR4, 0x2, URZ ;
.L_x_1:
        /*0030*/                   UIADD3 UR41, UP0, UR40, 0x4, URZ ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   UIADD3 UR20, UP0, UR40, 0x2, URZ ;
        /*0060*/                   EXIT ;
"""


def test_a_register_that_one_way_leaves_unwritten_is_found() -> None:
    assert undefined_reads(LOOPS) == ["UIADD3 UR20, UP0, UR40, 0x2, URZ"]
    assert undefined_reads(LOOPS.replace("@!P0 BRA `(.L_x_2)", "UMOV UR5, URZ")) == []


HELD = """
        /*0000*/                   LDSM.16.M88.4 R136, [R5+UR9] ;
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R136, gdesc[UR8], RZ, !UPT ;
        /*0020*/                   F2FP.BF16.F32.PACK_AB R137, R24, R25 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R56, R136, gdesc[UR8].tnspB, R56 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""


def test_an_operand_that_its_loop_overwrites_is_found() -> None:
    assert overwritten_operands(HELD) == ["HGMMA.64x64x16.F32.BF16 R24, R136, gdesc[UR8], RZ, !UPT"]
    elsewhere = HELD.replace("PACK_AB R137", "PACK_AB R140").replace("R56, R136", "R56, R140")
    assert overwritten_operands(elsewhere) == []


def test_three_warpgroups_go_to_what_was_compiled_for_them() -> None:
    """No call takes a tile that is not on the list above."""
    from rooftile.exact.backends.hopper.tiles import forward_tile

    ours = [c for c in FORWARD.values() if c.dim in (64, 128, 256) and not c.kernel.startswith("paged_decode")]
    listed = {(c.dim, c.tile, c.mask, c.layout, c.extras) for c in ours}
    for dim in (64, 128, 256):
        for one in ours:
            for T in (1, 1024, 100_000):
                spec = Configuration(dim, one.tile, one.mask, one.layout, one.extras).spec
                assert (dim, forward_tile(spec, T), one.mask, one.layout, one.extras) in listed
