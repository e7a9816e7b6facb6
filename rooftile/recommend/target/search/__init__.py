"""Searches of a history: which k events a candidate reads."""
