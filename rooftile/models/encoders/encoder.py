"""`Encoder`: one encoder for all families: embedding, layers whose tokens see each other, and perhaps a head for scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.api import attention_packed
from rooftile.exact.masks import FULL, Mask, Window
from rooftile.fused.norm import add_norm, normalise
from rooftile.fused.rope import Rotation, rotate
from rooftile.models.checkpoints import weights as checkpoint
from rooftile.models.config import ModelConfig
from rooftile.models.decoder import rotation_at
from rooftile.models.encoders.files import tensors_of
from rooftile.models.encoders.score_head import ScoreHead
from rooftile.models.feed_forward import FeedForward
from rooftile.models.layer_kinds import layer_of
from rooftile.models.layers import Layer
from rooftile.models.placement import Placement, placed
from rooftile.models.projection import Norm
from rooftile.runtime.dtypes import dtype_word, torch_dtype
from rooftile.runtime.words import answers_words
from rooftile.weights.files.folder import files_of


@answers_words
class Encoder(nn.Module):
    """An encoder for inference: tokens of several texts, laid back to back, to hidden states.

    There is no padding, and no text sees another. It never waits for the device, and no shape depends on data.

    Example:
        >>> encoder = Encoder.from_folder("bge-small-en-v1.5", device="cuda")               # doctest: +SKIP
        >>> cu = torch.tensor([0, 5, 12], dtype=torch.int32, device="cuda")                 # doctest: +SKIP
        >>> encoder(tokens, cu)  # (12, hidden) for two texts of 5 and 7 tokens             # doctest: +SKIP
    """

    rotary: Tensor | None
    local_rotary: Tensor | None

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str | None = None, max_len: int | None = None
    ) -> None:  # fmt: skip
        """Makes an encoder with uninitialised weights; use `from_folder` or `random` for one with weights.

        Raises:
            InvalidInput: the configuration is a decoder's.
        """
        super().__init__()
        if config.encoder is None:
            raise InvalidInput(f"the model is a decoder, {config.family}; rooftile.models.Decoder reads it")
        placement: Placement = placed(None, dtype, device)
        self.config, self.sizes = config, config.encoder
        self.embedding = placement.parameter(config.vocab_size, config.hidden)
        rows, types = config.max_len + self.sizes.first_position, self.sizes.token_types
        self.positions = placement.parameter(rows, config.hidden) if config.learned_positions else None
        self.token_types = placement.parameter(types, config.hidden) if types else None
        self.embedding_norm = Norm(config, config.hidden, placement=placement)
        # a ModuleList is a sequence of its modules, but torch's types do not say so
        self.layers = cast("Sequence[Layer]", nn.ModuleList(layer_of(config, n, placement) for n in range(config.layers)))
        self.norm = None if self.sizes.norms_sums else Norm(config, config.hidden, placement=placement)
        if not self.sizes.norms_sums:
            # it reads what the embedding's norm has written
            self.layers[0].mixer_norm = None
        self.head = None if self.sizes.head is None else ScoreHead(config, self.sizes.head, placement)
        self._masks: list[Mask] = [FULL if window is None else Window(window - 1, window - 1) for window in config.windows]
        length = config.max_len if max_len is None else min(max_len, config.max_len)
        for name, rotary in (("rotary", config.rotary), ("local_rotary", config.local_rotary)):
            table = None if rotary is None else rotary.table(length, dtype=placement.dtype, device=placement.device)
            self.register_buffer(name, table, persistent=False)
        if not self.sizes.norm_bias:
            for each in self.modules():
                if isinstance(each, Norm) and each.bias is not None:
                    each.bias.zero_()

    @classmethod
    def from_folder(
        cls, path: str | Path, dtype: torch.dtype | str = "auto", device: torch.device | str | None = None,
        *, max_len: int | None = None,
    ) -> Encoder:  # fmt: skip
        """Loads a checkpoint: config.json, and model.safetensors or its shards with their index.

        Args:
            path: the folder.
            dtype: the dtype of weights and computation, or its word such as "bf16"; "auto" takes the checkpoint's.
            device: None takes torch's default device.
            max_len: the longest text that it will read; None for as long as the checkpoint says.

        Raises:
            InvalidInput: the folder holds no encoder that is supported; the sentence says why.
        """
        asked = None if dtype_word(dtype, auto=True) == "auto" else torch_dtype(dtype)
        config = ModelConfig.from_folder(path)
        computed = config.dtype if asked is None else asked
        files = files_of(Path(path))
        # without memory: a wrong config.json allocates none
        checkpoint.check(config, cls(config, dtype=config.dtype, device="meta").tensors(), files)
        encoder = cls(config, dtype=computed, device=device, max_len=max_len)
        checkpoint.load(config, encoder.tensors(), files)
        return encoder

    @classmethod
    def random(
        cls, config: ModelConfig, dtype: torch.dtype | str = torch.float32, device: torch.device | str | None = None,
        seed: int = 0,
    ) -> Encoder:  # fmt: skip
        """Makes an encoder with random weights on the device, for benchmarks without a checkpoint."""
        encoder = cls(config, dtype=torch_dtype(dtype), device=device)
        generator = torch.Generator(encoder.embedding.device).manual_seed(seed)
        for part in encoder.modules():
            if isinstance(part, Norm):
                part.weight.fill_(1.0)
                if part.bias is not None:
                    part.bias.fill_(0.0)
            else:
                for weight in part.parameters(recurse=False):
                    weight.normal_(0.0, 0.02, generator=generator)
        return encoder

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor's name in the checkpoint, without prefix, and the view of a parameter that it fills."""
        return tensors_of(self)

    def forward(self, tokens: Tensor, cu: Tensor, types: Tensor | None = None) -> Tensor:
        """Returns the hidden states (total, hidden) after the last norm.

        Args:
            tokens: token ids, (total,) int64.
            cu: where texts begin, and the total, (B + 1,) int32; no text is longer than `config.max_len`.
            types: token types, (total,) int64; None for type 0, and for families without types.
        """
        starts = cu[:-1].repeat_interleave(cu.diff(), output_size=len(tokens))
        positions = torch.arange(len(tokens), device=tokens.device) - starts
        stream = self._embedded(tokens, positions, types)
        whole, local = rotation_at(self.rotary, positions), rotation_at(self.local_rotary, positions)

        def attend(n: int, /, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, **named: Any) -> Tensor:
            if rotation is not None:
                q, k = rotate(q, rotation), rotate(k, rotation)
            return attention_packed(q, k, v, cu, cu, self._masks[n], scale=self.config.scale)

        run = self._with_sums if self.sizes.norms_sums else self._with_norms_before
        return run(stream, [whole if window is None else local for window in self.config.windows], attend)

    def scores(self, hidden: Tensor, cu: Tensor) -> Tensor:
        """Returns a cross-encoder's logits (B, labels), in fp32, of hidden states (total, hidden).

        Raises:
            Unsupported: the model has no head.
        """
        if self.head is None:
            raise Unsupported("the model has no head that scores texts; a checkpoint ForSequenceClassification has one")
        starts = cu[:-1].long()
        if self.head.sizes.pooling == "cls":
            pooled = hidden.index_select(0, starts)
        else:
            pooled = torch.segment_reduce(hidden, "mean", lengths=cu.diff().long(), axis=0, unsafe=True)
        return self.head(pooled).float()

    def _embedded(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        stream = self.embedding.index_select(0, tokens)
        if self.token_types is not None:
            stream += self.token_types[0] if types is None else self.token_types.index_select(0, types)
        if self.positions is not None:
            stream += self.positions.index_select(0, positions + self.sizes.first_position)
        found: Tensor = normalise(stream, self.embedding_norm)
        return found

    def _with_sums(self, x: Tensor, rotations: list[Rotation | None], attend: Any) -> Tensor:
        """Runs layers whose norms are of sums."""
        for n, layer in enumerate(self.layers):
            after_mixing, after, feed_forward = _there(layer.mixer_post_norm, layer.ffn_post_norm, layer.feed_forward)
            x, _ = add_norm(layer.mix(n, x, rotations[n], attend), x, after_mixing)
            x, _ = add_norm(feed_forward(x), x, after)
        return x

    def _with_norms_before(self, stream: Tensor, rotations: list[Rotation | None], attend: Any) -> Tensor:
        """Runs layers with norms before their parts; each is fused with the addition before it."""
        # the first layer reads the stream itself, which later additions change
        x, following = stream.clone(), [*(layer.mixer_norm for layer in self.layers[1:]), self.norm]
        for n, layer in enumerate(self.layers):
            norm, next_norm, feed_forward = _there(layer.ffn_norm, following[n], layer.feed_forward)
            x, stream = add_norm(layer.mix(n, x, rotations[n], attend), stream, norm)
            x, stream = add_norm(feed_forward(x), stream, next_norm)
        return x


def _there(first: Norm | None, second: Norm | None, feed_forward: FeedForward | None) -> tuple[Norm, Norm, FeedForward]:
    """Returns the parts that each layer of an encoder has, and that layers of decoders may lack."""
    assert first is not None
    assert second is not None
    assert feed_forward is not None
    return first, second, feed_forward
