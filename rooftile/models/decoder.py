"""`Decoder`: one decoder for all families: embedding, layers that mix tokens and have a feed-forward, and output head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rooftile.errors import InvalidInput, Unsupported
from rooftile.fused.norm import add_norm, normalise
from rooftile.fused.one_row import project
from rooftile.fused.rope import Rotation
from rooftile.models import random_weights
from rooftile.models.checkpoints import places, quantised
from rooftile.models.checkpoints import weights as checkpoint
from rooftile.models.checkpoints.shares import shares_of
from rooftile.models.config import ModelConfig
from rooftile.models.layer_kinds import layer_of
from rooftile.models.layers import Attend, Layer, capped
from rooftile.models.placement import Placement, placed
from rooftile.models.projection import InputFormat, Multiply, Norm
from rooftile.runtime.dtypes import dtype_word, torch_dtype
from rooftile.runtime.words import answers_words
from rooftile.weights.files.folder import files_of
from rooftile.weights.files.plan import Weights, check_device, plan_of


@answers_words
class Decoder(nn.Module):
    """A decoder for inference: tokens in, hidden states and logits out; the caller mixes the tokens.

    Sequences are packed back to back, without padding. It never waits for the device, and no shape depends on data.

    Example:
        >>> decoder = Decoder.from_folder("Llama-3.2-1B", device="cuda")
        >>> hidden = decoder(tokens, positions, attend)  # (total, hidden)
        >>> decoder.logits(hidden[-1:]).argmax()
    """

    rotary: Tensor | None
    local_rotary: Tensor | None

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
        max_len: int | None = None, waits: bool = False, placement: Placement | None = None,
    ) -> None:  # fmt: skip
        """Makes a decoder with uninitialised weights; use `from_folder` or `random` for one with weights.

        `max_len` is the longest sequence that it will read, if that is less than config.max_len: rotary positions take memory.
        With `waits` the projections of layers have no weights yet. A `placement` says dtype, device, and which part of the
        model this rank holds: `config` is the whole model, and the decoder's own `config` has the sizes of the part.

        Raises:
            InvalidInput: the ranks of the placement cannot share the model, or the configuration is an encoder's.
        """
        super().__init__()
        if config.encoder is not None:
            raise InvalidInput(f"the model is an encoder, {config.family}; rooftile.models.Encoder reads it")
        self.placement = placement = placed(placement, dtype, device)
        self.config = placement.part(config)
        self.embedding = placement.parameter(config.vocab_size, config.hidden)
        self.positions = placement.parameter(config.max_len, config.hidden) if config.learned_positions else None
        # a ModuleList is a sequence of its modules, but torch's types do not say so
        self.layers = cast(
            "Sequence[Layer]", nn.ModuleList(layer_of(config, n, placement, waits=waits) for n in range(config.layers))
        )
        self.norm = Norm(config, config.hidden, placement=placement)
        self.head = self._head(config)
        length = config.max_len if max_len is None else min(max_len, config.max_len)
        for name, rotary in (("rotary", config.rotary), ("local_rotary", config.local_rotary)):
            table = None if rotary is None else rotary.table(length, dtype=placement.dtype, device=placement.device)
            self.register_buffer(name, table, persistent=False)
        # a number on the host, so that multiplying by it needs no copy; it is rounded like in Transformers
        scale = 1.0 if config.embedding_scale is None else config.embedding_scale
        self.embedding_scale = torch.tensor(scale, dtype=placement.dtype, device="cpu").item()

    def _head(self, config: ModelConfig) -> nn.Parameter:
        """Returns the rows of the output head that this rank holds."""
        rows = self.placement.columns(config.vocab_size)
        if not config.tie:
            return self.placement.parameter(rows.stop - rows.start, config.hidden)
        one_rank = self.placement.ranks == 1
        return self.embedding if one_rank else nn.Parameter(self.embedding[rows], requires_grad=False)

    @classmethod
    def from_folder(
        cls, path: str | Path, dtype: torch.dtype | str = "auto", device: torch.device | str | None = None,
        *, max_len: int | None = None, weights: Weights = "auto", on_layer: Callable[[Layer], None] | None = None,
        placement: Placement | None = None, headless: bool = False,
    ) -> Decoder:  # fmt: skip
        """Loads a checkpoint: config.json, and model.safetensors or its shards with their index.

        Args:
            path: the folder.
            dtype: the dtype of weights and computation, or its word such as "bf16"; "auto" takes the checkpoint's.
            device: None takes torch's default device.
            max_len: the longest sequence that it will read; None for as long as the checkpoint says.
            weights: the format of the layers' projections: "auto" takes the checkpoint's, a word of `rooftile.quantise_weight`
                or "2:4" quantises or masks them while they are read, and a dictionary {pattern: word} modules by their names.
            on_layer: called with each layer whose weights are quantised once its projections have them, while others are read.
            placement: the dtype, the device, and this rank's part of a model that several ranks share; no other part is
                read, except for modules that the checkpoint has quantised, which are read one by one.
            headless: whether the output head is left out, for a decoder that gives hidden states alone.

        Raises:
            InvalidInput: the folder holds no checkpoint that is supported, or the ranks cannot share the model; the sentence
                says why.
            Unsupported: the weights are in FP8, and the GPU has no products in it.
        """
        asked = None if dtype_word(dtype, auto=True) == "auto" else torch_dtype(dtype)
        config = ModelConfig.from_folder(path)
        config = replace(config, head=False, tie=True) if headless else config
        computed = config.dtype if asked is None and placement is None else asked
        placement = placed(placement, computed, device)
        # refused before any file of weights is opened
        placement.part(config)
        files = files_of(Path(path))
        reader = plan_of(weights, Path(path))
        check_device(reader, placement.device)
        # without memory: a wrong config.json allocates none
        whole = cls(config, dtype=config.dtype, device="meta") if reader is None else None
        shares = shares_of(config, placement) if placement.ranks > 1 else {}
        if reader is not None:
            decoder = cls(config, max_len=max_len, waits=True, placement=placement)
            quantised.load(config, decoder, files, reader, on_layer, shares)
            return decoder
        assert whole is not None
        checkpoint.check(config, whole.tensors(), files)
        decoder = cls(config, max_len=max_len, placement=placement)
        checkpoint.load(config, decoder.tensors(), files, shares)
        return decoder

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor's name in the checkpoint, without prefix, and the view of a parameter that it fills."""
        return places.tensors_of(self.config, self.embedding, self.positions, self.layers, self.norm, self.head)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
        seed: int = 0,
        *,
        placement: Placement | None = None,
    ) -> Decoder:
        """Makes a decoder with random weights on the device, for benchmarks without a checkpoint.

        Each rank of a placement, which replaces dtype and device, gets its part of the weights that one rank alone gets.
        """
        placement = placed(placement, None if placement is not None else torch_dtype(dtype), device)
        decoder = cls(config, placement=placement)
        generator = torch.Generator(decoder.embedding.device).manual_seed(seed)
        random_weights.fill(decoder, config, placement, generator)
        return decoder

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, multiply: Multiply = linear,
        streams: dict[int, Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the hidden states (total, hidden) after the last norm.

        Args:
            tokens: token ids, (total,) int64.
            positions: their positions in their sequences, (total,) int64.
            attend: mixes the tokens of each layer.
            multiply: computes the linear projections; `rooftile.fused.linear` is the batch-invariant one.
            streams: layers, for each of which it gets the residual stream (total, hidden) that reaches the layer; the number of
                layers stands for the stream behind the last one.
        """
        stream = self.embedding.index_select(0, tokens)
        if self.config.embedding_scale is not None:
            stream = stream * self.embedding_scale
        if self.positions is not None:
            stream = stream + self.positions.index_select(0, positions)
        rotations = self._rotations(positions)
        attend = self._with_growth(attend, positions)
        # each norm is fused with the addition before it, which belongs to the previous layer
        # ... and quantises what it writes, where the projection that reads it multiplies codes
        layers = list(self.layers)
        following = [*(layer.mixer_norm for layer in layers[1:]), self.norm]
        first = layers[0].mixer_norm
        x = stream if first is None else normalise(stream, first, *layers[0].rows_of_mixer(stream))
        if self.config.wide_stream:
            stream = stream.float()
        for n, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            if streams is not None and n in streams:
                # the stream is updated in place
                streams[n] = stream.clone()
            x, post = layer.mix(n, x, rotations[n], attend, multiply), layer.mixer_post_norm
            if layer.feed_forward is not None:
                x, stream = _added(x, stream, layer.ffn_norm, post, layer.feed_forward.rows(stream))
                x, post = layer.feed_forward(x, multiply), layer.ffn_post_norm
            rows = layers[n + 1].rows_of_mixer(stream) if n + 1 < len(layers) else InputFormat()
            x, stream = _added(x, stream, next_norm, post, rows)
        if streams is not None and len(layers) in streams:
            streams[len(layers)] = stream
        return x

    def logits(self, hidden: Tensor, multiply: Multiply = linear) -> Tensor:
        """Returns logits (n, vocab) of hidden states (n, hidden), in the model's dtype, or in fp32 after a softcap.

        Raises:
            Unsupported: the model has no output head.
        """
        if not self.config.head:
            raise Unsupported("the checkpoint has no output head, so its decoder gives hidden states and no logits")
        scores = (project if multiply is linear else multiply)(hidden, self.head, None)
        scores = self.placement.joined(scores, self.config.vocab_size)
        if self.config.logit_divisor is not None:
            scores = scores / self.config.logit_divisor
        cap = self.config.logit_softcap
        return scores if cap is None else capped(scores.float(), cap)

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Returns the rotation of queries and keys at positions (total,); None where they do not rotate.

        Layers with a window, or without positions, may differ.
        """
        return rotation_at(self.rotary, positions)

    def _with_growth(self, attend: Attend, positions: Tensor) -> Attend:
        """Returns `attend`, with queries multiplied by the factor of their position where the family has one."""
        if self.config.query_growth is None:
            return attend
        beta, length = self.config.query_growth
        factor = (1 + beta * torch.log(1 + torch.floor(positions / length))).to(self.embedding.dtype)[:, None, None]

        def grown(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
            return attend(layer, q * factor, k, v, rotation, *more)

        return grown

    def _rotations(self, positions: Tensor) -> list[Rotation | None]:
        """Returns the rotation of each layer."""
        whole = local = self.rotation(positions)
        if self.local_rotary is not None:
            local = rotation_at(self.local_rotary, positions)
        each = [whole if window is None else local for window in self.config.windows]
        return [None if n in self.config.unrotated else rotation for n, rotation in enumerate(each)]


def rotation_at(table: Tensor | None, positions: Tensor) -> Rotation | None:
    """Returns the rows of a rotary table at positions (total,); None without a table."""
    if table is None:
        return None
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    return Rotation(cos, sin)


def _added(x: Tensor, stream: Tensor, norm: Norm | None, post: Norm | None, rows: InputFormat) -> tuple[Any, Tensor]:
    """Returns what the next part of a layer reads, and the stream, to which x was added."""
    if norm is not None:
        return add_norm(x, stream, norm, post, *rows)
    stream = stream + (x if post is None else normalise(x, post))
    return stream.to(x.dtype), stream
