"""The machine: what its datasheet says (chips), what is here (device), what was measured here (ceilings)."""
