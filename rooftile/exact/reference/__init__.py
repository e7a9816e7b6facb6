"""The definitions: plain PyTorch, also in fp64, with O(T S) memory. Every backend is tested against them."""

from rooftile.exact.reference.attention import attention, attention_packed
from rooftile.exact.reference.gradients import gradients
from rooftile.exact.reference.merge import merge

__all__ = ["attention", "attention_packed", "gradients", "merge"]
