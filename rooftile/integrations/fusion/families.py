"""Says which class of Transformers becomes which fused one, and when it may not."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn

from rooftile.fused import ACTIVATIONS
from rooftile.integrations.fusion.classes import FusedModule
from rooftile.integrations.fusion.layers import CACHE

NAMES = "Llama, Mistral, Qwen 2, Qwen 3, Gemma 2 or GPT-2"

_NORM, _GATE, _ROTARY = "RMS norms", "gates of two projections", "rotary positions, of q and k in one layout"
_ADDED = "additions joined with the norm after them"
_LOSS = "loss from hidden states; logits is None where labels are given: rt.fuse(model, logits=True) keeps them"
_LOSS_WITH_LOGITS = "loss from logits, which are kept"

# the parameters of the forward functions that ours replace, besides the cache: another version of Transformers may have others
_ATTENTION = ("hidden_states", "position_embeddings", "attention_mask", "kwargs")
_LAYER = ("hidden_states", "attention_mask", "position_ids", "use_cache", "position_embeddings", "kwargs")
_GEMMA_LAYER = ("hidden_states", "position_embeddings", "attention_mask", "position_ids", "kwargs")
_BLOCK = ("hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "use_cache", "kwargs")


class Replacement(NamedTuple):
    """Names the forward function that a module gets."""

    kind: str  # a name in `classes.KINDS`
    title: str  # for the report
    due: tuple[str, ...] = ()  # parameters of the forward function that is replaced, besides a cache; empty: not asked


def _like_llama(folder: str, name: str, attention: str) -> dict[str, Replacement]:
    gemma = name == "Gemma2"
    found = {
        "RMSNorm": Replacement("gemma_norm" if gemma else "rms_norm", _NORM),
        "MLP": Replacement("gate", _GATE),
        "Attention": Replacement(attention, _ROTARY, _ATTENTION),
        "DecoderLayer": Replacement("gemma_layer", _ADDED, _GEMMA_LAYER)
        if gemma
        else Replacement("decoder_layer", _ADDED, _LAYER),
        "ForCausalLM": Replacement("loss", _LOSS),
    }
    return {f"transformers.models.{folder}.modeling_{folder}.{name}{part}": change for part, change in found.items()}


_GPT2 = "transformers.models.gpt2.modeling_gpt2."
_CHANGES = {
    **_like_llama("llama", "Llama", "llama_attention"),
    **_like_llama("mistral", "Mistral", "mistral_attention"),
    **_like_llama("qwen2", "Qwen2", "qwen_attention"),
    **_like_llama("qwen3", "Qwen3", "qwen_attention"),
    **_like_llama("gemma2", "Gemma2", "gemma_attention"),
    f"{_GPT2}GPT2Block": Replacement("gpt2_block", _ADDED, _BLOCK),
    f"{_GPT2}GPT2LMHeadModel": Replacement("loss", _LOSS),
    # only inside of a GPT-2
    "torch.nn.modules.normalization.LayerNorm": Replacement("layer_norm", "layer norms"),
    "transformers.activations.NewGELUActivation": Replacement("gelu", "GELUs, each in one kernel"),
}
_INSIDE_GPT2 = ("layer_norm", "gelu")


def plan(module: nn.Module, parent: nn.Module | None, logits: bool) -> Replacement | str | None:
    """Returns how a module is fused; a sentence that says why not; None if it is nothing that this package knows."""
    base: Any = type(module).fused_from if isinstance(module, FusedModule) else type(module)
    known: Any = next((cls for cls in base.__mro__ if _name(cls) in _CHANGES), None)
    if known is None:
        return None
    change = _CHANGES[_name(known)]
    if change.kind in _INSIDE_GPT2 and not any(_name(cls).startswith(_GPT2) for cls in type(parent).__mro__):
        return None
    if "forward" in vars(module):
        return f"{base.__name__} has a forward of its own on this instance, as accelerate's hooks set one"
    if base.forward is not known.forward:
        return f"{base.__name__} overrides the forward of {known.__name__}"
    source = inspect.unwrap(known.forward).__module__
    if source != known.__module__:
        return f"the forward of {known.__name__} was replaced by {source}"
    names = tuple(inspect.signature(known.forward).parameters)[1:]
    if change.due and set(names) not in ({*change.due, word} for word in CACHE):
        import transformers

        return f"{known.__name__}.forward of Transformers {transformers.__version__} takes {', '.join(names)}"
    return _settled(module, change, logits)


def _settled(module: nn.Module, change: Replacement, logits: bool) -> Replacement | str:
    """The change, with what depends on the module's settings."""
    if change.kind == "loss" and logits:
        return Replacement("loss_with_logits", _LOSS_WITH_LOGITS)
    if change.kind == "gate":
        activation = _activation(module.act_fn)
        if activation is None:
            return f"activation {type(module.act_fn).__name__}; has {', '.join(ACTIVATIONS)}"
        return change._replace(kind=f"gate_{activation}")
    return change


def _activation(function: object) -> str | None:
    from transformers.activations import ACT2FN

    # Transformers has two classes for one function
    if type(function) is nn.SiLU:
        return "silu"
    return next((name for name in ACTIVATIONS if type(ACT2FN[name]) is type(function)), None)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
