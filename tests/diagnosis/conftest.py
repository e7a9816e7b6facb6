"""Every test here runs with one thread, and leaves nothing behind that watches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import rooftile as rt
from tests.diagnosis import operators


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    # other test processes keep the cores busy, and a parallel region that waits for them costs milliseconds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_watches_any_more() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode() is None


@pytest.fixture
def fma_200() -> Iterator[None]:
    """The operator rooftile_test::fma_200."""
    with torch.library._scoped_library("rooftile_test", "FRAGMENT") as library:
        library.define("fma_200(Tensor x) -> Tensor")
        library.impl("fma_200", operators.fma_200, "CPU")
        counts = rt.diagnosis.counts(flops=lambda x: 400 * x.numel(), bytes=lambda x: 2 * x.nbytes)
        counts(torch.ops.rooftile_test.fma_200.default)
        yield
