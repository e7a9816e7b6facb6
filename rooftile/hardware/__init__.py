"""The machine: its datasheet (chips), what is here (device), what was measured here (ceilings)."""
