"""The kernel of AdamW compiles without a GPU, in registers, with loads of 16 bytes through its table of addresses."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.grids import pairs, swept

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_quantised_products_compile import compiled
from tests.kernels.test_sampling_compiles import stack

NUMBERS = (
    "lr", "kept", "size_of_step", "root", "beta1", "beta2", "log_beta1", "log_beta2", "eps", "decay", "sign", "left_out",
)  # fmt: skip
WORDS = dict.fromkeys(NUMBERS, "fp32") | {"table_ptr": "*i64", "chunks_ptr": "*i64", "lr_ptr": "*fp32", "clip_ptr": "*fp32"}


BOTH = (False, True)
# weights in fp32 are not split
KINDS = ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False))


@pytest.mark.parametrize(("kind", "counted", "sparse", "sm"), swept(product(KINDS, BOTH, BOTH, (80, 90)), pairs), ids=str)
def test_it_compiles(kind: tuple[torch.dtype, bool], counted: bool, sparse: bool, sm: int) -> None:
    from rooftile.optim import adamw_kernels

    dtype, split = kind
    moment = torch.float32 if split else dtype
    constants = adamw_kernels.constants_of(dtype, dtype, moment, split, sparse, counted, True, True, True)
    built = compiled(adamw_kernels._adamw, sm, constants, **WORDS)
    assert stack(built) == 0
    assert "ld.global.v4.b32" in built.asm["ptx"] or "ld.global.v2.b64" in built.asm["ptx"]
