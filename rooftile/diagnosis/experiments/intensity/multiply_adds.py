"""An operator of many multiply-adds per element that Inductor fuses into the pass of another one.

To the compiler it is one node: 256 multiplications and additions as nodes of their own take several times as long to compile.
Each step needs the result of the one before and its constants are not 1 and 0, so no compiler can leave one out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

FACTOR, SUMMAND = 0.9375, 0.0625


@cache
def operator() -> Any:
    """Returns `rooftile_diagnosis::multiply_adds(x, count)`; the first call defines it and tells Inductor about it."""
    library = torch.library.Library("rooftile_diagnosis", "DEF")
    library.define("multiply_adds(Tensor x, int count) -> Tensor")
    library.impl("multiply_adds", _plainly, "CompositeExplicitAutograd")
    torch.library.register_fake("rooftile_diagnosis::multiply_adds", lambda x, count: torch.empty_like(x), lib=library)
    found = torch.ops.rooftile_diagnosis.multiply_adds.default
    _lower(found)
    _LIBRARIES.append(library)
    return found


# an operator is gone with its library
_LIBRARIES: list[torch.library.Library] = []


def expected(x: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the result in fp64, by its closed form."""
    kept = FACTOR**count
    return x.double() * kept + SUMMAND * (1 - kept) / (1 - FACTOR)


def _plainly(x: torch.Tensor, count: int) -> torch.Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    for _ in range(count):
        wide = wide * FACTOR + SUMMAND
    return wide.to(x.dtype)


def _lower(target: Any) -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    @lowering.register_lowering(target, type_promotion_kind=None)
    def multiply_adds(x: Any, count: int) -> Any:
        dtype = x.get_dtype()
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        source = lowering.to_dtype(x, wide)
        load = source.make_loader()

        def steps(index: Any) -> Any:
            value = load(index)
            for _ in range(count):
                value = ops.add(ops.mul(value, ops.constant(FACTOR, wide)), ops.constant(SUMMAND, wide))
            return value

        made = ir.Pointwise.create(device=x.get_device(), dtype=wide, inner_fn=steps, ranges=list(x.get_size()))
        return lowering.to_dtype(made, dtype)
