"""The definitions: plain torch, able to run in fp64, O(T S) memory. Every backend is held against these."""

from rooftile.reference.attention import attention, attention_packed
from rooftile.reference.gradients import gradients
from rooftile.reference.merge import merge

__all__ = ["attention", "attention_packed", "gradients", "merge"]
