"""Tensors whose pages all lie in the cache, and generated kernels that run on them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import rooftile as rt
from rooftile.diagnosis.experiments.in_cache.pages import aliased

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory is Linux's")

BLOCK = 16 << 10


def test_each_part_repeats_its_first_block() -> None:
    x = torch.randn(3, 1 << 17).t()
    made = aliased(x, BLOCK, 2)
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
    block, flat, given = BLOCK // 4, made.t().flatten(), x.t().flatten()
    # 1.5 MiB are 96 blocks, in two parts
    first, second = flat.view(2, 48, block)
    assert torch.equal(first, given[:block].expand(48, block))
    assert torch.equal(second, given[48 * block : 49 * block].expand(48, block))
    # one number has many addresses
    made[0, 0] = 7.0
    assert made[block, 0] == 7.0
    assert x[0, 0] != 7.0


def test_what_is_small_is_copied() -> None:
    x = torch.randn(100)
    made = aliased(x, BLOCK, 2)
    assert torch.equal(made, x)
    assert made.data_ptr() != x.data_ptr()
    assert aliased(torch.empty(0), BLOCK, 2).numel() == 0


def test_its_memory_is_given_back() -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:rooftile")

    made = aliased(torch.randn(1 << 18), BLOCK, 1)
    assert mappings() == 64
    del made
    assert mappings() == 0


def test_a_generated_kernel_is_measured_and_left_as_it_is() -> None:
    x = torch.rand(1 << 20) + 1
    compiled = torch.compile(torch.lgamma)
    compiled(x)
    ops = rt.diagnose(compiled, x, budget=2).ops
    (op,) = [op for op in ops if op.op.startswith("inductor::")]
    assert op.experiments["cache"]["gain"] is not None
    assert op.experiments["why_not"]["size"] == "its sizes are compiled in"
    torch.testing.assert_close(compiled(x), torch.lgamma(x))
