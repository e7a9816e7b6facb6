"""Recurrences over a sequence whose tokens lie on several ranks, each with a contiguous range of them.

part         which sequences a rank has tokens of, and which of them cross its borders
carries      the map that a rank's tokens are on the state before them
travel       states and their gradients, from rank to rank
run          forward and backward
meeting      the agreement of ranks on a problem
plan, counts what travels and what is computed twice, in bytes and FLOPs
context      calls inside `rooftile.parallel.context`
"""
