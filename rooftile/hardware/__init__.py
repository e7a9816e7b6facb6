"""The machine: its datasheet (chips), what is here (device), how a call is timed (clock), what was measured here (ceilings)."""
