"""Users of target attention in pages: the kernels that write, copy out, search and read, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.recommend.test_scorer_target import (  # noqa: F401 - collected here
    check_users_of_a_batch,
    test_formats_of_pages,
)

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kind", ["SIM, soft", "SIM, hard", "ETA", "TWIN, last"])
def test_users_of_a_batch(kind: str) -> None:
    check_users_of_a_batch(kind, torch.float32)
