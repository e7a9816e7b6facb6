"""Compiles the Hopper kernels without a GPU and reads the machine code.

python -m tests.kernels.hopper_machine_code            the table of docs/reference/hopper-kernels.md
python -m tests.kernels.hopper_machine_code NAME ...   these configurations, a JSON line each
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_manager

from rooftile.exact.backends.hopper.decode import bf16, fp8
from rooftile.exact.backends.hopper.decode import launch_decode as decode
from rooftile.exact.backends.hopper.flash_bwd import dkdv, dq, dq_accumulator, fused
from rooftile.exact.backends.hopper.flash_bwd import launch_backward as backward
from rooftile.exact.backends.hopper.flash_fwd import kernel as forward_kernel
from rooftile.exact.backends.hopper.flash_fwd import launch_forward as forward
from rooftile.exact.backends.hopper.quantised import kernel as quantised_kernel
from rooftile.exact.backends.hopper.quantised import launch_8bit as quantised
from rooftile.exact.backends.hopper.tiles import (
    LONG,
    MASKED,
    NARROW,
    SHORT,
    THREE,
    TWO,
    WIDE,
    BiasKind,
    ForwardTile,
    backward_kv_tile,
    backward_q_tile,
    backward_tile,
    biased_backward_tile,
    biased_tile,
    listed_tile,
    padded,
    paged_tile,
)
from rooftile.exact.backends.hopper.tma import LINE, layout
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window
from rooftile.exact.spec import Spec
from rooftile.numerics.precision import PRESETS
from tests.kernels import register_flow
from tests.kernels.register_flow import overwritten_operands, undefined_reads

SUFFIX = {THREE: "-3", SHORT: "-short", LONG: "-long"}
# 16 bits, FP8, INT8
PRODUCT = r"\b[HQI]GMMA"
# the name of the file that keeps it; a change of the code that reads machine code changes the name
READERS = b"".join(Path(file).read_bytes() for file in (__file__, register_flow.__file__))
KEPT = f"found-{hashlib.sha256(READERS).hexdigest()[:16]}.json"
BIASES = {"bf16": BiasKind(2, False), "fp32": BiasKind(4, False), "bf16-row": BiasKind(2, True)}
# outputs and gradients are stored in fp32 for a caller that adds them up
STORED = ("o_desc", "dq_desc", "dk_desc", "dv_desc")
EVERYTHING = Window(100, 7) & Chunk(64) & Prefix(8)


@dataclass(frozen=True)
class Configuration:
    """A kernel that we ship, as one kind of call compiles it."""

    dim: int
    tile: ForwardTile | None  # the forward's
    mask: Mask = FULL
    layout: str = "dense"
    extras: bool = False  # softcap and sinks
    dtype: str = "bf16"
    kernel: str = "flash_fwd"
    add: bool = False  # flash_bwd: dq too
    values: int = 0  # the head dim of values, where it is another
    group: int = 1
    precision: str = ""  # the quantised forward's
    size: int = 0  # pages'
    bias: str = ""  # which of BIASES
    block: tuple[int, int] | None = None  # the size of listed blocks
    bits: bool = False  # some of them are seen in part
    wide: bool = False  # what it stores in fp32

    @property
    def spec(self) -> Spec:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]
        softcap = 20.0 if self.extras else 0.0
        return Spec(
            dtype=dtype, dim=self.dim, dim_v=self.values or self.dim, scale=1.0, mask=self.mask, layout=self.layout,
            softcap=softcap, has_sinks=self.extras, has_bias=bool(self.bias),
            group=self.group, precision=PRESETS.get(self.precision), device="sm90",
            has_kv_scales=self.kernel == "paged_decode_8bit", block_size=self.block,
            has_bits=self.bits,
        )  # fmt: skip

    @property
    def function(self) -> Any:
        name = self.name_of_kernel
        modules = (forward_kernel, quantised_kernel, fused, dkdv, dq, bf16, fp8)
        (module,) = [module for module in modules if hasattr(module, name)]
        return getattr(module, name)

    @property
    def name_of_kernel(self) -> str:
        return f"{self.kernel}_bias" if self.bias else f"{self.kernel}_listed" if self.block else self.kernel

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments, as the launchers give them."""
        if self.kernel.startswith("paged_decode"):
            found = decode.constants_of(self.spec, self.size, 256)
            return {name: value for name, value in found.items() if name not in ("num_warps", "maxnreg", "launch_pdl")}
        if self.precision:
            return {name: value for name, value in quantised.constants(self.spec).items() if name != "num_warps"}
        if self.tile is not None:
            found = forward.constants(self.spec, self.tile, self.size)
            if self.bias or self.block:
                found = forward.constants_without_pages(self.spec, self.tile)
            return {name: value for name, value in found.items() if name not in ("num_warps", "maxnreg")}
        if self.bias:
            tile = biased_backward_tile(self.spec, BIASES[self.bias])
            return backward._constants(self.spec, 1) | {"TILE": tile, "ACCUMULATE_DQ": True}
        tile = {"flash_bwd": backward_tile, "flash_bwd_kv": backward_kv_tile, "flash_bwd_q": backward_q_tile}[self.kernel]
        if self.block:
            return {name: x for name, x in backward._constants_over_lists(self.spec, 1).items() if name != "num_warps"}
        found = backward._constants(self.spec, 0 if self.kernel == "flash_bwd_q" else 1) | {"TILE": tile(self.spec)}
        return found | {"ACCUMULATE_DQ": self.add} if self.kernel == "flash_bwd" else found

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of the compiler."""
        if self.kernel.startswith("paged_decode"):
            found = decode.constants_of(self.spec, self.size, 256)
            return {name: found[name] for name in ("num_warps", "maxnreg")}
        if self.block and self.tile is not None:
            found = forward.constants_without_pages(self.spec, self.tile)
            return {name: found[name] for name in ("num_warps", "maxnreg") if name in found}
        return {"num_warps": 4}

    def descriptor(self, name: str) -> str:
        """The type of a descriptor, in Triton's words."""
        if name in ("lse_desc", "delta_desc"):
            return f"tensordesc<fp32[64],{LINE!r}>"
        if name == "bias_desc":
            keys = 64 if self.tile is None else self.tile.KEYS
            kind, box = self.bias.split("-")[0], (1, 1, BIASES[self.bias].rows, keys)
            return f"tensordesc<{kind}{list(box)},{layout(box, {'fp32': torch.float32, 'bf16': torch.bfloat16}[kind])!r}>"
        if name == "dq_sum_desc":
            rows, columns = dq_accumulator.UNIT_ROWS.value, dq_accumulator.UNIT_COLUMNS.value
            return f"tensordesc<fp32[{rows}, {columns}],{dq_accumulator.LAYOUT!r}>"
        if self.precision:
            box = dict(zip("qkvo", quantised.boxes(self.spec), strict=True))[name[0]]
            codes = torch.int8 if self.precision == "int8" and name[0] in "qk" else torch.float8_e4m3fn
            dtype = self.spec.dtype if name[0] == "o" else codes
            words = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8"}
            return f"tensordesc<{words[dtype]}{[1, *box]},{layout((1, *box), dtype)!r}>"
        box = (1, 64, padded(self.dim))
        if self.kernel.startswith("paged_decode"):
            box = decode.box_of(self.spec, self.size)
        elif self.tile is not None:
            box = dict(zip("qkvo", forward.boxes(self.spec, self.tile, self.size), strict=True))[name[0]]
        block = (1, *box)[-4:]
        if self.wide and name in STORED:
            return f"tensordesc<fp32{list(block)},{layout(block, torch.float32)!r}>"
        if self.spec.has_kv_scales:
            return f"tensordesc<fp8e4nv{list(block)},{layout(block, torch.float8_e4m3fn)!r}>"
        return f"tensordesc<{self.dtype}{list(block)},{layout(block, self.spec.dtype)!r}>"


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": CAUSAL},
    "window": {"mask": CAUSAL & Window(100)},
    "everything": {"mask": EVERYTHING, "layout": "packed", "extras": True},
    "packed": {"layout": "packed"},
    "packed-causal": {"mask": CAUSAL, "layout": "packed"},
}


def paged(dim: int, name: str, size: int) -> Configuration:
    """Keys and values in pages; of size 0: gathered out of them."""
    without = Configuration(dim, None, **CASES[name], size=size, group=4)
    return replace(without, tile=paged_tile(without.spec))


def listed(dim: int, name: str, block: tuple[int, int], bits: bool = False) -> Configuration:
    """Over lists of blocks."""
    without = Configuration(dim, None, **CASES[name], block=block, bits=bits)
    return replace(without, tile=listed_tile(without.spec))


FORWARD = {
    f"d{dim}-{name}{SUFFIX.get(tile, '')}": Configuration(dim, tile, **what)
    for dim, tile in ((64, NARROW), (64, SHORT), (64, THREE), (128, TWO), (128, LONG), (128, MASKED), (256, WIDE))
    for name, what in CASES.items()
    # what `forward_tile` gives these to
    if tile is not THREE or (what.get("mask", FULL) in (FULL, CAUSAL) and not what.get("extras"))
    if tile is not SHORT or (what.get("mask", FULL) == CAUSAL)
    if tile not in (TWO, MASKED) or (tile is MASKED) == (what.get("mask", FULL) != FULL)
    if tile is not LONG or (what.get("mask", FULL) in (FULL, CAUSAL) and "layout" not in what)
} | {
    # the heads of a group together
    **{
        f"d{dim}-{name}-group-8": Configuration(dim, tile._replace(HEADS_PER_TILE=8), **CASES[name], group=8)
        for dim, tile in ((64, SHORT), (128, MASKED), (256, WIDE))
        for name in ("causal", "everything", "packed-causal")
    },
    "d128-causal-group-64": Configuration(128, MASKED._replace(HEADS_PER_TILE=64), CAUSAL, group=64),
    "d128-fp16": Configuration(128, MASKED, CAUSAL, dtype="fp16"),
    # between two powers of two, padded to the next
    **{
        f"d96-{name}": Configuration(96, tile._replace(Q_IN_REGISTERS=64), **CASES[name])
        for name, tile in (("full", LONG), ("causal", MASKED), ("packed-causal", MASKED))
    },
    **{f"d192-v128-{name}": Configuration(192, WIDE, **CASES[name], values=128) for name in ("full", "causal", "packed-causal")},
}
FORWARD |= {
    f"d{dim}-{name}-{bias}-bias": Configuration(dim, biased_tile(Configuration(dim, None).spec, BIASES[bias]), **what, bias=bias)
    for dim in (64, 96, 128)
    for bias in BIASES
    for name, what in (("full", {}), ("causal", {"mask": CAUSAL}))
    if dim == 128 or (bias, name) == ("bf16", "causal")
}
FORWARD |= {
    # over lists of blocks
    f"d{dim}-{name}-blocks-{rows}x{keys}": listed(dim, name, (rows, keys))
    for dim, name, rows, keys in (
        (64, "full", 128, 128), (64, "packed-causal", 128, 128), (128, "full", 128, 128), (128, "causal", 128, 128),
        (128, "full", 128, 64), (128, "everything", 256, 128), (64, "causal", 64, 64), (128, "full", 64, 64),
        (128, "everything", 64, 128), (256, "causal", 64, 64), (96, "causal", 128, 128), (256, "causal", 128, 128),
    )
}  # fmt: skip
FORWARD |= {
    f"d{dim}-{name}-bits-{rows}x{keys}": listed(dim, name, (rows, keys), True)
    for dim, name, rows, keys in (
        (64, "full", 128, 128), (128, "full", 128, 128), (128, "full", 64, 64), (128, "everything", 128, 128),
        (256, "causal", 128, 128),
    )
}  # fmt: skip
FORWARD |= {
    # keys and values in pages
    f"d{dim}-pages-{size}-{name}": paged(dim, name, size)
    for dim, size, name in (
        (64, 16, "packed-causal"), (64, 16, "everything"), (128, 16, "packed-causal"), (128, 16, "packed"),
        (128, 64, "packed-causal"), (128, 256, "packed-causal"), (256, 16, "packed-causal"),
    )
} | {f"d{dim}-gathered-packed-causal": paged(dim, "packed-causal", 0) for dim in (64, 128, 256)}  # fmt: skip
FORWARD |= {
    # one query per sequence
    f"decode-d{dim}-pages-{size}-{name}": Configuration(dim, None, **what, kernel="paged_decode", size=size, group=4)
    for dim, size, name, what in (
        (64, 16, "causal", {"mask": CAUSAL}), (128, 16, "causal", {"mask": CAUSAL}), (128, 256, "causal", {"mask": CAUSAL}),
        (128, 16, "everything", {"mask": CAUSAL & Window(100) & Chunk(64), "extras": True}),
    )
}  # fmt: skip
FORWARD |= {
    # the same with a cache in FP8
    f"decode-fp8-d{dim}-pages-{size}-{name}": Configuration(dim, None, **what, kernel="paged_decode_8bit", size=size)
    for dim, size, name, what in (
        (64, 16, "causal", {"mask": CAUSAL, "group": 4}), (128, 16, "causal", {"mask": CAUSAL, "group": 4}),
        (128, 256, "fp16", {"mask": CAUSAL, "group": 16, "dtype": "fp16"}),
        (128, 16, "everything", {"mask": CAUSAL & Window(100) & Chunk(64), "group": 32, "extras": True}),
    )
}  # fmt: skip
FORWARD |= {
    # over the keys of one of several ranks
    f"{kernel}-partial": Configuration(128, None, CAUSAL, kernel=kernel, size=16, group=4, wide=True)
    for kernel in ("paged_decode", "paged_decode_8bit")
}
FORWARD |= {
    f"{precision}-d{dim}-{name}": Configuration(dim, None, **CASES[name], kernel="flash_fwd_8bit", precision=precision)
    for precision in PRESETS
    for dim in (64, 128, 256)
    for name in ("full", "causal", "window", "packed-causal")
}
FORWARD |= {
    # over a part of the keys, for a ring
    f"d{dim}-{name}-partial{SUFFIX.get(tile, '')}": Configuration(dim, tile, **CASES[name], wide=True)
    for dim, name, tile in (
        (64, "causal", NARROW), (128, "full", LONG), (128, "causal", LONG), (128, "window", MASKED), (128, "everything", MASKED),
        (256, "packed-causal", WIDE),
    )
}  # fmt: skip
FORWARD["d128-causal-partial-group-4"] = Configuration(128, MASKED._replace(HEADS_PER_TILE=4), CAUSAL, group=4, wide=True)
BACKWARD = {
    f"bwd-{part}d{dim}-{name}": Configuration(dim, None, **CASES[name], kernel=kernel, add=part == "")
    for kernel, part, dims, names in (
        ("flash_bwd", "", (64, 128), tuple(CASES)),
        # in a fixed order, without dq
        ("flash_bwd", "ordered-", (64, 128), ("full", "causal")),
        ("flash_bwd_kv", "kv-", (256,), tuple(CASES)),
        ("flash_bwd_q", "q-", (256,), tuple(CASES)),
        ("flash_bwd_q", "q-", (64, 128), ("full", "causal")),
    )
    for dim in dims
    for name in names
} | {
    **{
        f"bwd-d{dim}-{name}-{bias}-bias": Configuration(dim, None, **CASES[name], kernel="flash_bwd", add=True, bias=bias)
        for dim in (64, 128)
        for name in ("full", "causal")
        for bias in BIASES
        if dim == 128 or bias == "bf16"
    },
    "bwd-d128-fp16": Configuration(128, None, CAUSAL, dtype="fp16", kernel="flash_bwd", add=True),
    # over lists of blocks
    **{
        f"bwd-d{dim}-{name}-blocks-128x128": Configuration(
            dim, None, **CASES[name], kernel="flash_bwd", add=True, block=(128, 128)
        )
        for dim, name in (
            (64, "full"),
            (64, "packed-causal"),
            (96, "causal"),
            (128, "full"),
            (128, "causal"),
            (128, "everything"),
        )
    },
    **{
        f"bwd-d{dim}-{name}-bits-128x128": Configuration(
            dim, None, **CASES[name], kernel="flash_bwd", add=True, block=(128, 128), bits=True
        )
        for dim, name in ((64, "full"), (128, "full"), (128, "packed-causal"))
    },
    **{
        f"bwd-{part}d{dim}-{name}-fp32-grads": Configuration(dim, None, **CASES[name], kernel=kernel, add=part == "", wide=True)
        for kernel, part, dim, name in (
            ("flash_bwd", "", 64, "causal"),
            ("flash_bwd", "", 128, "full"),
            ("flash_bwd", "", 128, "causal"),
            ("flash_bwd", "", 128, "window"),
            ("flash_bwd", "", 128, "packed-causal"),
            ("flash_bwd", "", 128, "everything"),
            ("flash_bwd", "ordered-", 128, "causal"),
            ("flash_bwd_kv", "kv-", 256, "packed-causal"),
            ("flash_bwd_q", "q-", 128, "causal"),
            ("flash_bwd_q", "q-", 256, "packed-causal"),
        )
    },
    "bwd-d128-full-group-4": Configuration(128, None, kernel="flash_bwd", add=True, group=4),
    "bwd-d96-packed-causal": Configuration(96, None, CAUSAL, "packed", kernel="flash_bwd", add=True),
    "bwd-kv-d192-v128-packed-causal": Configuration(192, None, CAUSAL, "packed", kernel="flash_bwd_kv", values=128),
    "bwd-q-d192-v128-packed-causal": Configuration(192, None, CAUSAL, "packed", kernel="flash_bwd_q", values=128),
}
CONFIGURATIONS: dict[str, Configuration] = FORWARD | BACKWARD


@dataclass(frozen=True)
class Found:
    """The properties of a kernel, read from its machine code."""

    registers: int
    stack: int  # bytes
    shared: int  # bytes
    hot_spills: int  # accesses to local memory in loops with matrix products
    loop: int  # instructions per block: the forward's unmasked loop; the backward's longest role, with its mask
    products: int  # HGMMA instructions, or those of FP8 and INT8
    undefined: int  # reads of registers that nothing may have written
    overwritten: int  # products whose left side is held in registers, and is overwritten there
    serialised: bool  # the assembler warned that it takes matrix products one by one


def compiled(configuration: Configuration) -> Found:
    """Compiles a configuration and reads its machine code, once: Triton's cache keeps what was found beside the kernel."""
    source = source_of(configuration)
    built, words = _build(source, configuration.options)
    kept = get_cache_manager(built.hash)
    if (path := kept.get_file(KEPT)) is not None:
        return Found(**json.loads(Path(path).read_text()))
    # a kernel from Triton's cache comes without the output of ptxas
    found = _read(*((built, words) if words else _build(source, configuration.options, anew=True)), configuration)
    kept.put(json.dumps(asdict(found)), KEPT, binary=False)
    return found


def ptx_of(configuration: Configuration) -> str:
    """Compiles a configuration; returns its PTX."""
    return _build(source_of(configuration), configuration.options)[0].asm["ptx"]


def source_of(configuration: Configuration) -> GluonASTSource:
    """Returns a configuration's kernel as it is launched."""
    kernel = configuration.function
    constants = configuration.constants
    words = {"lse_ptr", "sinks_ptr", "partials_ptr", "delta_ptr", "shift_ptr", "q_scales_ptr", "k_scales_ptr", "v_scales_ptr"}
    words |= {"k_scale_ptr", "v_scale_ptr"}
    lists = {"counts_ptr", "indices_ptr", "entries_ptr", "bits_ptr"}
    numbers = lists | {"cu_q_ptr", "cu_k_ptr", "table_ptr", "lengths_ptr", "counter_ptr", "nan_flag_ptr"}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_desc"):
            return configuration.descriptor(name)
        if name.endswith("_ptr"):
            if name == "bias_ptr":
                return "*" + configuration.bias.split("-")[0]
            if configuration.wide and name.replace("_ptr", "_desc") in STORED:
                return "*fp32"
            return "*" + ("fp32" if name in words else "i32" if name in numbers else configuration.dtype)
        return "fp32" if name in ("scale", "softcap") else "i32"

    names = kernel.arg_names
    return GluonASTSource(
        kernel,
        {name: kind(name) for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name.endswith("_ptr")},
    )


def _build(source: GluonASTSource, options: dict[str, Any], anew: bool = False) -> tuple[Any, str]:
    """Returns the kernel and the output of ptxas, which is empty if the kernel was in Triton's cache."""
    words = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(words):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = anew
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return built, words.getvalue()


def _read(built: Any, words: str, configuration: Configuration) -> Found:
    assert "Compiling entry function" in words, "the output of ptxas is missing, and with it its warnings"
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "k.cubin")
        cubin.write_bytes(built.asm["cubin"])
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", cubin)
        code = _run(tools / "nvdisasm", "-c", cubin)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    loops = _loops(code)
    return Found(
        registers=int(registers),
        stack=int(stack),
        shared=built.metadata.shared,
        hot_spills=sum(bool(re.search(r"\b(LDL|STL)", line)) for body in loops for line in body),
        loop=(max if configuration.kernel.startswith("flash_bwd") else min)(len(body) for body in loops),
        products=len(re.findall(PRODUCT, code)),
        undefined=len(undefined_reads(code)),
        overwritten=len(overwritten_operands(code)),
        serialised="C75" in words,
    )


def _run(*command: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _loops(code: str) -> list[list[str]]:
    """The innermost loops with matrix products."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    spans = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            # what comes after the last exit waits for a barrier and goes back to where it came from
            if back and back[1] in labels:
                spans.append((labels[back[1]], len(lines)))
    end = max(n for n, line in enumerate(lines) if "EXIT" in line)
    spans = [(a, b) for a, b in spans if b <= end and any(re.search(PRODUCT, line) for line in lines[a:b])]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [lines[a:b] for a, b in inner]


def table() -> str:
    """All configurations, as a Markdown table."""
    rows = ["| kernel | registers | stack | shared | instructions per block | HGMMA |", "|---|--:|--:|--:|--:|--:|"]
    for name, configuration in CONFIGURATIONS.items():
        found = compiled(configuration)
        rows.append(f"| `{name}` | {found.registers} | {found.stack} | {found.shared:,} | {found.loop} | {found.products} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(table())
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, "triton": triton.__version__, **asdict(compiled(CONFIGURATIONS[name]))}))
