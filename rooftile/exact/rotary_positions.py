"""Rotary positions for layers that project their own queries and keys."""

from __future__ import annotations

from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.fused.rope import Rotation, rotated_as_defined
from rooftile.recurrent.split.context import places_in_context


class RotaryPositions(nn.Module):
    """Rotates queries and keys (B, T, H, D) by their place in the text: the same module serves all layers of a model.

    Args:
        table: the cosines, then the sines, of every place, (length, R), R at most D.
    """

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        # it follows from the model's configuration, so it is not saved
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotates x, in fp32, and rounds once. Inside of `rooftile.parallel.context` x has this rank's tokens of a text."""
        T, length = x.shape[1], self.table.shape[0]
        places = places_in_context(T)
        needed = T if places is None else int(places.max()) + 1 if T else 0
        if length < needed:
            due = "make it with a larger max_len"
            raise InvalidInput(f"the text has {needed:,} tokens; this model has positions for {length:,}: {due}")
        rows = self.table[:T] if places is None else self.table[places.to(self.table.device)]
        cos, sin = rows.chunk(2, dim=-1)
        return rotated_as_defined(x, Rotation(cos, sin))
