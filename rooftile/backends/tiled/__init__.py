"""Being written."""
from collections.abc import Iterator
from rooftile.spec import Spec
NAME = "tiled"


def refusals(spec: Spec) -> Iterator[str]:
    yield "being written"
