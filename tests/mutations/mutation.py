"""`Mutation`: one broken line of the code, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A line of a file in a package, its broken version, and the tests that must fail."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    interpreted: bool = False
    package: str = "rooftile"
