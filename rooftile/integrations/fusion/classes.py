"""Makes a fused class: a subclass of a module's own class, whose `forward` comes from a kind in `KINDS`.

It has the name of the class that it stands for, because others ask for it: `save_pretrained` writes it into config.json, and FSDP
and Trainer compare it. It is made in memory, so an instance is pickled as its kind and its own class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from rooftile.fused import ACTIVATIONS
from rooftile.integrations.fusion import layers, loss

# forward functions by kind: each takes the module, then the arguments of the forward that it replaces
KINDS: dict[str, Callable[..., Any]] = {
    "rms_norm": layers.rms_norm,
    "gemma_norm": layers.gemma_norm,
    "layer_norm": layers.layer_norm,
    **{f"gate_{name}": functools.partial(layers.gate, activation=name) for name in ACTIVATIONS},
    "gelu": layers.gelu,
    "llama_attention": layers.llama_attention,
    "mistral_attention": layers.mistral_attention,
    "qwen_attention": layers.qwen_attention,
    "gemma_attention": layers.gemma_attention,
    "decoder_layer": layers.decoder_layer,
    "gemma_layer": layers.gemma_layer,
    "gpt2_block": layers.gpt2_block,
    "loss": loss.without_logits,
    "loss_with_logits": loss.with_logits,
}


class FusedModule(nn.Module):
    """Base class of all modules that `fuse` changed."""

    fused_kind: ClassVar[str]
    fused_from: ClassVar[type[nn.Module]]
    # the names of its arguments, in their order
    fused_parameters: ClassVar[tuple[str, ...]]
    # the function of the modelling file that stands for attn_implementation="eager"
    fused_eager_attention: ClassVar[Callable[..., Any] | None]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        return _empty, (self.fused_kind, self.fused_from), *made[2:]


@functools.cache
def class_of(kind: str, base: type[nn.Module]) -> type[FusedModule]:
    """The fused class of a kind for modules of class `base`; one and the same for all of them."""
    forward = functools.wraps(base.forward)(_method(KINDS[kind]))
    eager = inspect.unwrap(base.forward).__globals__.get("eager_attention_forward")
    body = {
        "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__, "forward": forward,
        "fused_kind": kind, "fused_from": base, "fused_eager_attention": staticmethod(eager) if eager else None,
        "fused_parameters": tuple(inspect.signature(base.forward).parameters)[1:],
    }  # fmt: skip
    return type(base.__name__, (FusedModule, base), body)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own, so that `functools.wraps` gives each class the signature of the forward that it replaces."""

    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        return function(self, *arguments, **words)

    return forward


def _empty(kind: str, base: type[nn.Module]) -> FusedModule:
    made = class_of(kind, base)
    return made.__new__(made)
