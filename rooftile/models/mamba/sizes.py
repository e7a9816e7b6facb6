"""The sizes of layers with a recurrence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_choice, check_count, check_flag, shown
from rooftile.runtime.words import answers_words


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """The sizes of a model's Mamba-1 layers.

    Args:
        width: channels of the recurrence.
        rank: numbers that the time steps of a token are projected from.
        state: the N of a channel's state.
        kernel: taps of the convolution.
        bias, conv_bias: whether the projections and the convolution have biases.
        selection_norms: RMS norms of what a token selects by (what its time steps are projected from, B and C): "plain", without
            weights (Falcon-Mamba), "weighted" (Jamba), or None for no norms.
        selection_eps: the number added to their variance.

    Raises:
        InvalidInput: a size makes no sense.
    """

    width: int
    rank: int
    state: int = 16
    kernel: int = 4
    bias: bool = False
    conv_bias: bool = True
    selection_norms: str | None = None
    selection_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("width", "rank", "state", "kernel"):
            check_count(name, getattr(self, name))
        if self.selection_norms is not None:
            check_choice("selection_norms", self.selection_norms, ("plain", "weighted"))
        if not self.selection_eps >= 0:
            raise InvalidInput(f"selection_eps is {self.selection_eps}; must be at least 0")
        _check_parts(self)

    @property
    def convolved(self) -> int:
        """The numbers of a token that the convolution reads: x."""
        return self.width

    @property
    def projected(self) -> int:
        """The numbers of a token that the first projection gives: x and z."""
        return 2 * self.width


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """The sizes of a model's Mamba-2 layers.

    Args:
        heads, head_dim: heads of the recurrence, and their size.
        groups: groups of heads, each with one B and one C; a divisor of heads.
        state: the N of a head's state, head_dim x N numbers.
        kernel: taps of the convolution.
        step_limit: the least and the largest time step, after the softplus.
        bias, conv_bias: whether the projections and the convolution have biases.
        norm_groups: groups of numbers that the norm behind the gate takes each by itself; `groups` if None, as Mamba-2 was
            trained. Transformers before 5.24 takes all together: a model that was trained there with several groups needs 1.

    Raises:
        InvalidInput: the sizes do not go together.
    """

    heads: int
    head_dim: int
    groups: int = 1
    state: int = 128
    kernel: int = 4
    step_limit: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    conv_bias: bool = True
    norm_groups: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "groups", "state", "kernel"):
            check_count(name, getattr(self, name))
        if self.norm_groups is None:
            object.__setattr__(self, "norm_groups", self.groups)
        check_count("norm_groups", self.norm_groups)
        if self.heads % self.groups:
            raise InvalidInput(f"heads is {self.heads} and groups {self.groups}; the second must divide the first")
        if self.width % self.norms:
            raise InvalidInput(f"norm_groups is {self.norms}; must divide heads times head_dim, {self.width}")
        _check_parts(self)
        limit = self.step_limit
        if not isinstance(limit, tuple | list) or len(limit) != 2 or not all(_is_number(bound) for bound in limit):
            raise InvalidInput(f"step_limit is {shown(limit)}; must be two numbers, the least and the largest step")
        object.__setattr__(self, "step_limit", tuple(limit))
        if not 0 <= limit[0] < limit[1]:
            raise InvalidInput(f"step_limit is {self.step_limit}; must be two numbers, of which the first is at least 0 and less")

    @property
    def norms(self) -> int:
        """The groups that the norm takes each by itself."""
        assert self.norm_groups is not None
        return self.norm_groups

    @property
    def width(self) -> int:
        """The numbers of all heads of a token."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """The numbers of a token that the convolution reads: x, B and C."""
        return self.width + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """The numbers of a token that the first projection gives: z, x, B, C and the time steps."""
        return self.width + self.convolved + self.heads


def _check_parts(sizes: MambaSizes | Mamba2Sizes) -> None:
    """Checks what Mamba-1 and Mamba-2 have in common."""
    if sizes.kernel < 2:
        raise InvalidInput(f"kernel is {sizes.kernel}; must be at least 2")
    for name in ("bias", "conv_bias"):
        check_flag(name, getattr(sizes, name))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
