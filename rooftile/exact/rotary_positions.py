"""Rotary positions for layers that project their own queries and keys."""

from __future__ import annotations

from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.fused.rope import Rotation, rotated_as_defined


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
        """Rotates x, in fp32, and rounds once."""
        T, length = x.shape[1], self.table.shape[0]
        if length < T:
            due = "make it with a larger max_len"
            raise InvalidInput(f"the text has {T:,} tokens; this model has positions for {length:,}: {due}")
        cos, sin = self.table[:T].chunk(2, dim=-1)
        return rotated_as_defined(x, Rotation(cos, sin))
