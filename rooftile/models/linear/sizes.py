"""The sizes of layers of linear attention and of Performer."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.approximate.performer.definition import KINDS
from rooftile.approximate.performer.features import IN_PAIRS
from rooftile.errors import InvalidInput
from rooftile.recurrent.linear.features import PLAIN
from rooftile.runtime.arguments import check_choice, check_count, check_flag
from rooftile.runtime.words import answers_words


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSizes:
    """The options of a model's layers of linear attention; their heads are the model's.

    Args:
        feature, normalise: as in `rooftile.approximate.linear`.

    Raises:
        InvalidInput: there is no such feature.
    """

    feature: str = "elu"
    normalise: bool = True

    def __post_init__(self) -> None:
        check_choice("feature", self.feature, PLAIN)
        check_flag("normalise", self.normalise)


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class PerformerSizes:
    """The sizes of a model's Performer layers; their heads are the model's, and each layer has a projection.

    Args:
        m: features of a query or key.
        kind: as in `rooftile.approximate.Features.draw`.

    Raises:
        InvalidInput: the sizes do not go together.
    """

    m: int = 256
    kind: str = "positive"

    def __post_init__(self) -> None:
        check_count("m", self.m)
        check_choice("kind", self.kind, KINDS)
        if self.kind in IN_PAIRS and self.m % 2:
            raise InvalidInput(f"m is {self.m}; must be even: {self.kind} makes two features of each row of its projection")

    @property
    def rows(self) -> int:
        """The rows of the projection."""
        return self.m // 2 if self.kind in IN_PAIRS else self.m
