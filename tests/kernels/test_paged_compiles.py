"""The Triton kernels for a paged cache compile for the chips that they are for, without one, and keep their rows in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Window  # noqa: E402
from rooftile.exact.spec import Spec  # noqa: E402

# shared memory of a program
LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@pytest.mark.parametrize(
    ("sm", "dim", "group", "T", "mask", "dtype"),
    [
        (90, 128, 4, 1, CAUSAL, torch.bfloat16),
        (90, 64, 4, 0, CAUSAL, torch.bfloat16),
        (80, 128, 8, 1, CAUSAL & Window(1024), torch.bfloat16),
        (89, 256, 1, 0, FULL, torch.bfloat16),
        (100, 80, 71, 1, CAUSAL, torch.bfloat16),
        pytest.param(90, 128, 1, 0, CAUSAL, torch.float32, marks=pytest.mark.sweep),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_it_compiles(sm: int, dim: int, group: int, T: int, mask: Mask, dtype: torch.dtype, split: bool) -> None:
    from rooftile.exact.backends.triton import paged_fwd

    spec = Spec(dtype=dtype, dim=dim, dim_v=dim, group=group, mask=mask, scale=1.0, layout="paged", device=f"sm{sm}")
    constants = paged_fwd._constants(spec, T == 0, 16, T) | {"SPLIT": split}
    assert_compiles(paged_fwd._forward, constants, sm, dtype)
    if split:
        assert_compiles(paged_fwd._join, constants, sm, dtype)


@pytest.mark.parametrize(
    ("sm", "dim", "group", "T", "mask", "dtype"),
    [
        (90, 128, 8, 4, CAUSAL, torch.bfloat16),
        (80, 128, 1, 1, CAUSAL, torch.float16),
        (89, 256, 1, 1, FULL, torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                (90, 128, 4, 1, CAUSAL, torch.bfloat16),
                (90, 64, 4, 1, CAUSAL, torch.bfloat16),
                (90, 256, 2, 1, CAUSAL & Window(4096), torch.bfloat16),
            )
        ),
        (100, 80, 71, 1, CAUSAL, torch.bfloat16),
        (90, 128, 1, 1, CAUSAL, torch.float32),
    ],
    ids=str,
)
def test_decoding_compiles(sm: int, dim: int, group: int, T: int, mask: Mask, dtype: torch.dtype) -> None:
    from rooftile.exact.backends.device import split_kv
    from rooftile.exact.backends.triton import paged_decode

    spec = Spec(dtype=dtype, dim=dim, dim_v=dim, group=group, mask=mask, scale=1.0, layout="paged", device=f"sm{sm}")
    assert paged_decode.fits(spec, T)
    constants = paged_decode._constants(spec, 16, T, 256)
    assert_compiles(paged_decode._decode, constants, sm, dtype, beside=8 // paged_decode._warps(spec) if sm >= 90 else 1)
    assert_compiles(split_kv._merge, constants, sm, dtype)


@pytest.mark.parametrize(("sm", "dim"), [(89, 128), (90, 64), (90, 128), (90, 256), (100, 128)])
def test_decoding_from_caches_in_fp8_compiles(sm: int, dim: int) -> None:
    from rooftile.exact.backends.triton import paged_decode

    what = {"dtype": torch.bfloat16, "dim": dim, "dim_v": dim, "group": 4, "mask": CAUSAL, "scale": 1.0}
    spec = Spec(**what, layout="paged", device=f"sm{sm}", has_kv_scales=True)
    assert_compiles(paged_decode._decode, paged_decode._constants(spec, 16, 1, 256), sm, torch.bfloat16)


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL & Window(9) & Chunk(64)], ids=str)
def test_what_hoppers_own_decoding_leaves_is_merged(mask: Mask) -> None:
    from rooftile.exact.backends.device import split_kv
    from rooftile.exact.backends.hopper.decode import launch_decode

    paged = {"layout": "paged", "queries": "one", "device": "sm90"}
    spec = Spec(dtype=torch.bfloat16, dim=128, dim_v=128, group=4, mask=mask, scale=1.0, **paged)
    assert_compiles(split_kv._merge, launch_decode._constants_of_merge(spec, 16, 256), 90, torch.bfloat16)


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_writing_and_gathering_compile(sm: int) -> None:
    from rooftile.fused.kernels import rope
    from rooftile.kvcache import page_kernels

    # Ampere has no FP8
    for scaled in (False, True) if sm > 80 else (False,):
        for q_heads in (0, 32):
            writes = page_kernels._writes(8, q_heads, 128, 64, 16, scaled, torch.device("cpu"))
            assert_compiles(page_kernels._write, writes, sm, torch.bfloat16)
        assert_compiles(page_kernels._gather, page_kernels._gathers(8, 128, 128, 16, 256, scaled), sm, torch.bfloat16)
    assert_compiles(rope._rotate, rope.rotates(8, 128, 64), sm, torch.bfloat16)


def assert_compiles(kernel, constants: dict, sm: int, dtype: torch.dtype, beside: int = 1) -> None:
    """In the shared memory of a chip, so many programs beside each other, and on Hopper in registers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {name: value for name, value in constants.items() if name in kernel.arg_names}
    ints = dict.fromkeys(("table_ptr", "lengths_ptr", "cu_q_ptr", "cu_k_ptr"), "*i32") | {"slots_ptr": "*i64"}
    numbers = ("partials_ptr", "lse_ptr", "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr")
    tuples = dict.fromkeys(("q_strides", "scale_strides", "alibi_strides"), 2) | {"k_strides": 3, "v_strides": 3}
    if constants.get("SCALED") or getattr(constants.get("SPEC"), "SCALED", False):
        ints |= dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv")
    signature = {}
    for name in kernel.arg_names:
        if name in known:
            signature[name] = "constexpr"
        elif name in tuples:
            signature[name] = ("i32",) * tuples[name]
        elif name.endswith("_ptr"):
            signature[name] = ints.get(name, "*fp32" if name in numbers else f"*{WORDS[dtype]}")
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
    places = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    aligned = [(n,) for n, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or "_stride_" in name]
    strides = [(n, name) for n, name in enumerate(kernel.arg_names) if name.endswith("_strides")]
    aligned += [(n, i) for n, name in strides for i in range(tuples[name])]
    source = ASTSource(kernel, signature, places, {place: [["tt.divisibility", 16]] for place in aligned})
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": constants.get("num_warps", 4)})
    assert beside * built.metadata.shared <= LIMIT[sm]
    if sm == 90 and dtype == torch.bfloat16:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        cubin = Path("/tmp") / f"{built.metadata.hash}.cubin"
        cubin.write_bytes(built.asm["cubin"])
        used = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
        cubin.unlink()
        assert int(re.findall(r"STACK:(\d+)", used)[-1]) <= 16, used
