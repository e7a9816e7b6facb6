"""Exact attention, with or without windows."""
