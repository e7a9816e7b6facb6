"""Operators that one kernel could compute, and what a compiler of forward and backward saves besides."""
