"""The names that families have for the parts of a decoder in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftile.models import wrappers
from rooftile.models.config import ModelConfig
from rooftile.models.mixers import MIXERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a decoder's parts; the defaults are Llama's.

    Args:
        prefix: begins all names but the head's; some checkpoints leave it out.
        prefixes: what else may begin them, the first that fits.
        embedding, layers, norm: parts of the decoder.
        mixer_norm, ffn_norm: the norms before what mixes tokens and before the feed-forward.
        attention, recurrence, feed_forward: parts of a layer.
        gate_up, down: the projections of a dense feed-forward; the first in one piece or two.
        skipped: begin the names of tensors that are no part of the decoder, such as a second predictor, behind the prefix.
        renamed: other words that files have within a name, and ours.
        joined: tensors of a part that files may have in pieces, and the words for the pieces.
    """

    prefix: str = "model."
    prefixes: tuple[str, ...] = ()
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    mixer_norm: str = "input_layernorm"
    ffn_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    recurrence: str = "mamba"
    feed_forward: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    skipped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def without_prefix(self, name: str) -> str:
        """Returns the name of a tensor as the decoder has it."""
        prefix = next((one for one in (*self.prefixes, self.prefix) if name.startswith(one)), "")
        return name[len(prefix) :]

    def mixer_of(self, mixer: str) -> str:
        """Returns the name of what mixes tokens in a layer of a kind."""
        return self.attention if MIXERS[mixer] else self.recurrence


_MAMBA = Names(prefix="backbone.", embedding="embeddings", norm="norm_f", mixer_norm="norm", recurrence="mixer")
_QWEN = Names(recurrence="linear_attn", skipped=("mtp.",))
_BAMBA = Names(norm="final_layernorm", ffn_norm="pre_ff_layernorm", feed_forward="feed_forward")
_FAMILIES = {
    "bamba": _BAMBA,
    "jamba": _BAMBA,
    "falcon_mamba": _MAMBA,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "olmo_hybrid": Names(
        recurrence="linear_attn",
        renamed=(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
        joined=(("conv1d.weight", ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")),),
    ),
    "granitemoehybrid": Names(feed_forward="shared_mlp", gate_up=("input_linear",), down="output_linear"),
    # files have blocks, which are given the names of layers' parts
    "nemotron_h": Names(
        prefix="backbone.", prefixes=("model.",), embedding="embeddings", norm="norm_f", gate_up=("up_proj",), skipped=("mtp.",)
    ),
    "mimo": Names(skipped=("mtp_layers.",)),
    "phi3": Names(gate_up=("gate_up_proj",)),
    "gpt2": Names(prefix="transformer.", embedding="wte", layers="h", norm="ln_f"),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
}


# a pooler and heads for other tasks are no part of a model that gives vectors
_HEADS = ("pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier.", "embeddings.position_ids")
# files of TensorFlow's time
_GAMMA = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
_ENCODERS = {
    "bert": (Names(prefix="bert.", layers="encoder.layer", renamed=_GAMMA), ("pooler.", "classifier.")),
    "roberta": (Names(prefix="roberta.", layers="encoder.layer", renamed=_GAMMA), ("classifier.",)),
    "modernbert": (Names(), ("head.", "classifier.")),
}


def _of_encoder(config: ModelConfig) -> Names:
    names, of_head = _ENCODERS[config.family]
    assert config.encoder is not None
    kept = () if config.encoder.head is None else of_head
    return replace(names, skipped=tuple(name for name in _HEADS if name not in kept))


def names_of(config: ModelConfig) -> Names:
    """Returns the names that a model's family has, within a wrapper if there is one."""
    names = _of_family(config)
    if not config.head:
        names = replace(names, skipped=(*names.skipped, "lm_head."))
    if config.wrapper is None:
        return names
    return replace(names, prefixes=wrappers.PREFIXES, skipped=(*names.skipped, *wrappers.VISION))


def _of_family(config: ModelConfig) -> Names:
    if config.encoder is not None:
        return _of_encoder(config)
    if config.family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        # layers behind the last guess further tokens; config.json need not say that there is one
        return Names(skipped=tuple(f"layers.{config.layers + n}." for n in range(max(1, config.mtp_layers))))
    # in layers with four norms the second has another name
    usual = Names(ffn_norm="pre_feedforward_layernorm") if config.post_norms else Names()
    return _FAMILIES.get(config.family, usual)
