"""Forward functions in place of Transformers' own, with the same arguments and results.

Modules inside are called as modules, so adapters around linear layers and hooks run as before. Only a norm that follows an
addition is joined with it, where no hook watches the norm: see `_added`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused.gated import gate_up
from rooftile.fused.norms import add_layer_norm, add_rms_norm
from rooftile.fused.norms import layer_norm as fused_layer_norm
from rooftile.fused.norms import rms_norm as fused_rms_norm
from rooftile.fused.rope import rotary

# the names of a layer's cache: since Transformers 5.24, which still takes the earlier one, and before
CACHE = ("cache", "past_key_values")


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """For LlamaRMSNorm and its like. The result has the dtype of the hidden states, also if the weights are wider."""
    return fused_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def gemma_norm(self: Any, x: Tensor) -> Tensor:
    """For Gemma2RMSNorm, whose weights are distances from one."""
    return fused_rms_norm(x, self.weight, self.eps, True)


def layer_norm(self: Any, input: Tensor) -> Tensor:
    """For the nn.LayerNorm of GPT-2. Under autocast it computes in fp32, and returns it, as PyTorch does."""
    if torch.is_autocast_enabled(input.device.type):
        input = input.float()
    return fused_layer_norm(input, self.weight, self.bias, self.eps)


def gate(self: Any, x: Tensor, *, activation: str) -> Tensor:
    """For LlamaMLP and its like: down(act(gate(x)) * up(x)); `activation` is a name in `rooftile.fused.ACTIVATIONS`."""
    return self.down_proj(gate_up(self.gate_proj(x), self.up_proj(x), activation))


def gelu(self: Any, input: Tensor) -> Tensor:
    """For NewGELUActivation, whose formula takes Transformers eight kernels."""
    return functional.gelu(input, approximate="tanh")


def llama_attention(self: Any, hidden_states: Tensor, *arguments: Any, **words: Any) -> tuple[Tensor, Tensor | None]:
    """For LlamaAttention, which has no window."""
    return _attention(self, hidden_states, {}, *arguments, **words)


def mistral_attention(self: Any, hidden_states: Tensor, *arguments: Any, **words: Any) -> tuple[Tensor, Tensor | None]:
    """For MistralAttention, whose window is the model's."""
    mask = {"sliding_window": getattr(self.config, "sliding_window", None)}
    return _attention(self, hidden_states, mask, *arguments, **words)


def qwen_attention(self: Any, hidden_states: Tensor, *arguments: Any, **words: Any) -> tuple[Tensor, Tensor | None]:
    """For Qwen2Attention and Qwen3Attention, whose layers have a window each."""
    return _attention(self, hidden_states, {"sliding_window": self.sliding_window}, *arguments, **words)


def gemma_attention(self: Any, hidden_states: Tensor, *arguments: Any, **words: Any) -> tuple[Tensor, Tensor | None]:
    """For Gemma2Attention, with a window for each layer and a softcap."""
    mask = {"sliding_window": self.sliding_window, "softcap": self.attn_logit_softcapping}
    return _attention(self, hidden_states, mask, *arguments, **words)


def _attention(
    self: Any, hidden_states: Tensor, mask: dict[str, Any], position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None, cache: Any = None, *, past_key_values: Any = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Heads are rotated where the projection wrote them, (B, T, H, D), and transposed afterwards."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    # both halves of the angles are alike
    cos, sin = (angles[..., : angles.shape[-1] // 2] for angles in position_embeddings)
    q, k = rotary(q, k, cos, sin)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    cache = past_key_values if cache is None else cache
    if cache is not None:
        # since Transformers 5.24 a cache gets what the attention function gets
        k, v = cache.update(k, v, self.layer_idx, **({"kwargs": kwargs} if _word(self) == "cache" else {}))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.fused_eager_attention)
    dropout = self.attention_dropout if self.training else 0.0
    o, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **mask, **kwargs)
    return self.o_proj(o.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def decoder_layer(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
    cache: Any = None, use_cache: bool | None = False, position_embeddings: Any = None, *, past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """For LlamaDecoderLayer and its like: the addition of attention's output is one pass with the norm that follows."""
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask, position_ids=position_ids,
        use_cache=use_cache, position_embeddings=position_embeddings, **_named(self, cache, past_key_values), **kwargs,
    )  # fmt: skip
    normed, stream = _added(self.post_attention_layernorm, attended, hidden_states)
    return stream + self.mlp(normed)


def gemma_layer(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None, cache: Any = None, *, past_key_values: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """For Gemma2DecoderLayer, which also normalises what it adds."""
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states), position_embeddings=position_embeddings,
        attention_mask=attention_mask, position_ids=position_ids, **_named(self, cache, past_key_values), **kwargs,
    )  # fmt: skip
    normed, stream = _added(self.pre_feedforward_layernorm, self.post_attention_layernorm(attended), hidden_states)
    return stream + self.post_feedforward_layernorm(self.mlp(normed))


def gpt2_block(
    self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None, encoder_attention_mask: Tensor | None = None,
    use_cache: bool | None = False, *, past_key_values: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """For GPT2Block; a block with cross-attention runs as Transformers wrote it."""
    words = {"attention_mask": attention_mask, "use_cache": use_cache, **_named(self, cache, past_key_values)}
    if encoder_hidden_states is not None:
        states = {"encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask}
        whole: Tensor = self.fused_from.forward(self, hidden_states, **words, **states, **kwargs)
        return whole
    attended, _ = self.attn(self.ln_1(hidden_states), **words, **kwargs)
    normed, stream = _added(self.ln_2, attended, hidden_states)
    return stream + self.mlp(normed)


def _word(self: Any) -> str:
    """The name that the forward function of a module has for its cache."""
    return next(word for word in CACHE if word in self.fused_parameters)


def _named(self: Any, cache: Any, past_key_values: Any) -> dict[str, Any]:
    """The cache of a layer, under the name that its attention has for it, too."""
    return {_word(self): past_key_values if cache is None else cache}


def _added(norm: Any, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Adds x to the stream; returns the norm of the sum, and the sum.

    One pass, unless the norm is not fused, hooks watch it, or autocast made x narrower than the stream.
    """
    kind = getattr(norm, "fused_kind", None)
    if kind is not None and x.dtype == stream.dtype and not (norm._forward_hooks or norm._forward_pre_hooks):
        if kind == "layer_norm":
            return add_layer_norm(x, stream, norm.weight, norm.bias, norm.eps)
        plus_one = kind == "gemma_norm"
        return add_rms_norm(x, stream, norm.weight, norm.eps if plus_one else norm.variance_epsilon, plus_one)
    stream = stream + x
    return norm(stream), stream
