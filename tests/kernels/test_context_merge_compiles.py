"""The merge of ranks' parts compiles without a GPU, and keeps its numbers in registers."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("dim", "has_sinks"), [(128, False), (256, True), (80, False)])
def test_merging(sm: int, dim: int, has_sinks: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.engine.mixers.exact import merge_kernels

    constants = dict(merge_kernels.constants_of(dim, has_sinks))
    warps, names = constants.pop("num_warps"), merge_kernels._merge.arg_names
    pointers = {"parts_ptr": "*fp32", "sinks_ptr": "*bf16", "o_ptr": "*bf16"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    known = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(
        fn=merge_kernels._merge, signature=signature, constexprs=known,
        attrs={(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name in pointers},
    )  # fmt: skip
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps})
    assert ".local" not in built.asm["ptx"]
    assert built.metadata.shared <= 64
