"""The definitions: plain PyTorch, also in fp64, with O(T S) memory. Every backend is tested against them."""

from rooftile.reference.attention import attention, attention_packed
from rooftile.reference.gradients import gradients
from rooftile.reference.merge import merge

__all__ = ["attention", "attention_packed", "gradients", "merge"]
