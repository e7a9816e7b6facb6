"""Draws the keys that each query sees under each mask, and counts the pairs. Run: python examples/masks.py"""

from rooftile import CAUSAL, FULL, Chunk, Prefix, Window
from rooftile.exact.masks import draw, pairs

T = S = 24

for mask in (FULL, CAUSAL, CAUSAL & Window(6), Window(3, 3), Prefix(8), CAUSAL & Chunk(8)):
    print(f"{mask}: {pairs(mask, T, S)} of {T * S} pairs")
    print(draw(mask, T, S), end="\n\n")
