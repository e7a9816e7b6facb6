"""`ModelConfig`: the configuration of a decoder, which is read from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rooftile.errors import InvalidInput
from rooftile.models.delta.sizes import DeltaSizes
from rooftile.models.encoders.sizes import EncoderSizes
from rooftile.models.experts.sizes import ExpertSizes, check_feed_forwards
from rooftile.models.families import fields_of
from rooftile.models.latent.sizes import LatentSizes
from rooftile.models.linear.sizes import LinearSizes, PerformerSizes
from rooftile.models.mamba.sizes import Mamba2Sizes, MambaSizes
from rooftile.models.mixer_checks import MOST_NUMBERS, check_mixers
from rooftile.models.mixers import BRANCHES, MIXERS, NativeSparseSizes
from rooftile.models.parts import part_of
from rooftile.models.rotary import Rotary
from rooftile.runtime.words import answers_foreign_words, answers_words
from rooftile.weights.files.folder import check_folder
from rooftile.weights.files.settings import read_json

# limits beyond what any model has: a downloaded file may ask for more memory than there is
MOST_POSITIONS = 1 << 24
MOST_DIMS = 1 << 16
MOST_MTP_LAYERS = 64


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder: its sizes, and everything in which families differ.

    Args:
        family: a name out of `rooftile.models.families.FAMILIES`, such as "llama".
        vocab_size, layers, hidden: sizes.
        heads, kv_heads, head_dim: sizes of attention; 0 where no layer has it.
        ffn: width of the feed-forward; 0 where no layer has one.
        max_len: the longest sequence in tokens.
        scale: attention scores are multiplied by it.
        query_growth: (beta, length): queries at position i are multiplied by 1 + beta log(1 + i // length) (Ministral 3).
        softcap: attention scores are soft-capped to (-softcap, softcap); None for no softcap.
        windows: for each layer how many tokens a query sees, itself included; None for all tokens before it. An encoder's
            queries see as many after them.
        mixers: for each layer what mixes its tokens: "attention", "native_sparse" (Native Sparse Attention), "linear"
            (linear attention), "performer", "mamba", "mamba2", "delta" (gated delta net) or "latent" (multi-head latent
            attention); empty for attention in all layers.
        feed_forwards: for each layer what follows: "dense", "experts", or None for nothing; empty for "dense" in all layers.
        native_sparse: the sizes of Native Sparse Attention, where a layer has it.
        linear, performer: the sizes of linear attention and of Performer, where a layer has it.
        mamba, mamba2, delta: the sizes of Mamba-1, Mamba-2 and the gated delta net, where a layer has it.
        latent: the sizes of multi-head latent attention, where a layer has it.
        experts: the sizes of feed-forwards with experts, where a layer has one.
        encoder: what an encoder has beside; None for a decoder.
        rotary: rotary positions of queries and keys, in the first rotary.dim numbers of each head; None for no rotation.
        learned_positions: positions are learned vectors, which are added to the embedding (GPT-2).
        local_rotary: the positions of layers with a window, if theirs are others (Gemma 3, OLMo 3).
        unrotated: the layers whose queries and keys have no positions at all (SmolLM3).
        norm, norm_eps: "rms" or "layer" norm, and the number added to its variance.
        norm_plus_one: norms multiply by 1 + weight (Gemma).
        norm_rounds_once: norms round only after they multiply by the weight (OLMo).
        post_norms: the outputs of attention and feed-forward are normalised before they are added (Gemma 2).
        pre_norms: the inputs of attention and feed-forward are normalised; without them (OLMo) there are post_norms.
        post_normed: the layers with post_norms in place of pre_norms, where the others have pre_norms (OLMo Hybrid).
        qk_norm: queries and keys are normalised per head (Qwen 3).
        qk_norm_of_all_heads: they are normalised over all heads at once (OLMo).
        attention_gate: the output of attention is multiplied by the sigmoid of gates, which are projected beside the queries
            (Qwen3-Next).
        sinks: each head of attention has a logit that takes part in the softmax with a value of zero (gpt-oss).
        qkv_bound: queries, keys and values are clamped to (-qkv_bound, qkv_bound) (OLMoE).
        activation: the activation of the feed-forward.
        gated: whether the feed-forward has a gate.
        qkv_bias, o_bias, mlp_bias: which projections have biases.
        embedding_scale: embeddings are multiplied by it, rounded to the model's dtype (Gemma).
        logit_softcap: logits are soft-capped to (-logit_softcap, logit_softcap).
        wide_stream: the residual stream is in fp32, whatever dtype the model computes in (Mamba).
        residual_scale: the outputs of attention and feed-forward are multiplied by it (Granite).
        logit_divisor: logits are divided by it (Granite).
        tie: whether the output head shares the embedding's weights.
        head: whether there is an output head; without one, which needs `tie`, a decoder gives hidden states alone.
        mtp_layers: how many layers behind the last one guess further tokens (multi-token prediction). They are no part of the
            decoder; `rooftile.models.drafts` reads one.
        wrapper: the model type of a checkpoint of which this is the text part (`rooftile.models.wrappers`), such as "qwen3_5";
            None for a decoder by itself.
        bos_ids, eos_ids: the tokens that begin and that end a text.
        dtype: the checkpoint's dtype.

    Raises:
        InvalidInput: sizes are out of bounds or contradict each other.
    """

    family: str
    vocab_size: int
    layers: int
    hidden: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    max_len: int
    scale: float = 1.0
    windows: tuple[int | None, ...]
    rotary: Rotary | None
    learned_positions: bool = False
    mixers: tuple[str, ...] = ()
    feed_forwards: tuple[str | None, ...] = ()
    native_sparse: NativeSparseSizes | None = None
    linear: LinearSizes | None = None
    performer: PerformerSizes | None = None
    mamba: MambaSizes | None = None
    mamba2: Mamba2Sizes | None = None
    delta: DeltaSizes | None = None
    latent: LatentSizes | None = None
    experts: ExpertSizes | None = None
    encoder: EncoderSizes | None = None
    local_rotary: Rotary | None = None
    unrotated: tuple[int, ...] = ()
    query_growth: tuple[float, int] | None = None
    softcap: float | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    norm_rounds_once: bool = False
    post_norms: bool = False
    pre_norms: bool = True
    post_normed: tuple[int, ...] = ()
    qk_norm: bool = False
    qk_norm_of_all_heads: bool = False
    attention_gate: bool = False
    sinks: bool = False
    qkv_bound: float | None = None
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    wide_stream: bool = False
    residual_scale: float | None = None
    logit_divisor: float | None = None
    tie: bool = False
    head: bool = True
    mtp_layers: int = 0
    wrapper: str | None = None
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not self.mixers:
            object.__setattr__(self, "mixers", ("attention",) * self.layers)
        if not self.feed_forwards:
            object.__setattr__(self, "feed_forwards", ("dense",) * self.layers)
        self._check_layers()
        self._check_sizes()
        self._check_norms()
        check_mixers(self)

    @property
    def attends(self) -> bool:
        """Whether a layer has heads of attention."""
        return any(MIXERS[mixer] for mixer in self.mixers)

    @answers_foreign_words
    def part(self, ranks: int, *, deal_experts: bool = False) -> ModelConfig:
        """Returns the sizes of what each of `ranks` ranks holds (`rooftile.models.placement`); refuses what does not fit.

        Args:
            ranks: how many ranks share the model.
            deal_experts: whether each rank holds some of the experts, whole, in place of a slice of each.
        """
        return self if ranks == 1 else part_of(self, ranks, deal_experts=deal_experts)

    def norms_of(self, n: int) -> tuple[bool, bool]:
        """Returns whether layer n has norms before its parts, and behind them."""
        return (False, True) if n in self.post_normed else (self.pre_norms, self.post_norms)

    def _check_sizes(self) -> None:
        names = ["vocab_size", "layers", "hidden", "max_len"]
        names += ["heads", "kv_heads", "head_dim"] if self.attends else []
        names += ["ffn"] if "dense" in self.feed_forwards else []
        for name in names:
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; must be at least 1")
        if self.attends and self.heads % self.kv_heads:
            raise InvalidInput(f"heads is {self.heads} and kv_heads {self.kv_heads}; the second must divide the first")
        if self.rotary is not None and (self.rotary.dim % 2 or not 2 <= self.rotary.dim <= self.head_dim):
            raise InvalidInput(
                f"head_dim is {self.head_dim} and rotary.dim {self.rotary.dim}; the second must be even, and from 2 to the first"
            )
        if self.max_len > MOST_POSITIONS:
            raise InvalidInput(f"max_len is {self.max_len:,} positions; may be at most {MOST_POSITIONS:,}")
        if self.head_dim > MOST_DIMS:
            raise InvalidInput(f"head_dim is {self.head_dim:,}; may be at most {MOST_DIMS:,}")
        pairs = 1 if self.native_sparse is None else BRANCHES
        projected = [sizes.projected for sizes in (self.mamba, self.mamba2, self.delta, self.experts) if sizes is not None]
        heads = (1 + self.attention_gate) * self.heads + 2 * pairs * self.kv_heads
        rows = max(self.vocab_size, heads * self.head_dim, 2 * self.ffn, *projected)
        columns = self.hidden
        if self.latent is not None:
            rows, columns = max(rows, self.latent.rows(self.heads)), max(columns, self.latent.rank, self.latent.query_rank or 0)
        if rows * columns > MOST_NUMBERS:
            raise InvalidInput(f"a matrix would be {rows:,} x {columns:,} numbers; may have at most {MOST_NUMBERS:,}")

    def _check_norms(self) -> None:
        if not (self.head or self.tie):
            raise InvalidInput("head and tie are both off; a model without an output head has no weights of it: set tie")
        if not (self.pre_norms or self.post_norms):
            raise InvalidInput("pre_norms and post_norms are both off; a layer must have one of them")
        if any(not 0 <= n < self.layers for n in self.post_normed):
            raise InvalidInput(f"post_normed is {self.post_normed}; must be numbers of layers, from 0 to {self.layers - 1}")
        if not self.norm_eps >= 0:
            raise InvalidInput(f"norm_eps is {self.norm_eps}; must be at least 0")

    def _check_layers(self) -> None:
        if self.layers < 1:
            raise InvalidInput(f"layers is {self.layers}; must be at least 1")
        if not 0 <= self.mtp_layers <= MOST_MTP_LAYERS:
            raise InvalidInput(f"mtp_layers is {self.mtp_layers:,}; must be from 0 to {MOST_MTP_LAYERS}")
        if len(self.windows) != self.layers:
            raise InvalidInput(f"windows are {len(self.windows)}; must be one for each of {self.layers} layers")
        for window in self.windows:
            if window is not None and window < 1:
                raise InvalidInput(f"a window is {window}; must be at least 1, the query itself, or None")
        if len(self.mixers) != self.layers or any(mixer not in list(MIXERS) for mixer in self.mixers):
            raise InvalidInput(
                f"mixers are {str(self.mixers)[:60]}; must be {' or '.join(map(repr, MIXERS))} for each of {self.layers} layers"
            )
        check_feed_forwards(self.feed_forwards, self.layers, self.experts)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Reads a checkpoint's config.json, and token ids in generation_config.json, if there is one.

        Every token that either of them names as an end of text is one.

        Raises:
            InvalidInput: the folder has no checkpoint, or one that `Decoder` does not support.
        """
        folder = check_folder(path)
        settings = read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            generation = read_json(folder / "generation_config.json")
            if generation.get("bos_token_id") is not None:
                settings["bos_token_id"] = generation["bos_token_id"]
            if generation.get("eos_token_id") is not None:
                settings["eos_token_id"] = [*_listed(settings.get("eos_token_id")), *_listed(generation["eos_token_id"])]
        return config_of(settings, str(folder))


def _listed(ids: Any) -> list[Any]:
    """Returns a setting that holds one token id, a list of them, or null, as a list."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def config_of(values: Mapping[str, Any], folder: str) -> ModelConfig:
    """The configuration that config.json of a folder, as a dictionary, describes.

    Raises:
        InvalidInput: it is of no family here, quantised, or asks for what is not supported.
    """
    return ModelConfig(**fields_of(values, folder))
