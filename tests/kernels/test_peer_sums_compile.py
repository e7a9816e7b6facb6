"""Kernels that sum over GPUs compile for Hopper to the loads and stores that another GPU sees."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rooftile.engine.ranks.peers.kernels import sum_chunks, sum_words

KERNELS = {"words": (sum_words, 512, 4), "chunks": (sum_chunks, 4096, 8)}
SIGNATURE = {"X": "*i32", "Peers": "*i64", "Counts": "*i32", "Stop": "*i32", "words": "i32"}


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16, tl.float32], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_and_wait_with_the_system_in_view(name: str, dtype: tl.dtype) -> None:
    kernel, block, warps = KERNELS[name]
    constants = {"RANK": 0, "ROOM": 1 << 16, "RANKS": 2, "BLOCK": block, "dtype": dtype}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(5)}
    source = ASTSource(kernel, SIGNATURE | dict.fromkeys(constants, "constexpr"), constants, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    if name == "words":
        # a word and its number arrive together, and are read anew each time
        assert "st.global.v2.b64" in ptx
        assert "ld.volatile.global.v2.b64" in ptx
    else:
        assert "atom.global.sys.release" in ptx
        assert "ld.global.sys.acquire" in ptx
