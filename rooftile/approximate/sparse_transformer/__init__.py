"""Sparse Transformer: fixed and strided patterns of keys."""
