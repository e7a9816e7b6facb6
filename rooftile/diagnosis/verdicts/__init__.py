"""Verdicts: pure functions from counts, ceilings and measurements to what bounds an operator or a step."""
