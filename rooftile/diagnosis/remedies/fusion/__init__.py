"""Operators that one kernel could compute, and further savings of a compiler of forward and backward."""
