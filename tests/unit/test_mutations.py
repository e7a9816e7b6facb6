"""Each line that `tests/mutations/` breaks is there, once."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("name", MUTATIONS)
def test_its_line_is_there_once(name: str) -> None:
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.package / mutation.file).read_text().count(mutation.before) == 1
    assert all((ROOT / test).exists() for test in mutation.tests if test.startswith("tests/"))
