"""`Embedder`: texts in tokens, through a model in packed batches, to vectors and scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rooftile.engine.embedding.folder import Recipe
from rooftile.engine.embedding.packed import PackedDecoder
from rooftile.engine.embedding.pooling import pool
from rooftile.engine.embedding.reading import ReadText
from rooftile.engine.embedding.steps import ACTIVATIONS, Steps
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder, Encoder

# the most tokens of a batch on a CPU, whose caches still hold the intermediate results
CPU_TOKENS = 2048


class Embedder:
    """A model that turns texts into vectors, or pairs of texts into scores.

    Args:
        model: an encoder, or a decoder whose layers all have exact attention.
        recipe: how vectors are made of hidden states.
        max_batched_tokens: the most tokens of a batch; a longer text is a batch of its own.

    Raises:
        Unsupported: the decoder has other layers, or several ranks share it.
    """

    def __init__(self, model: Encoder | Decoder, recipe: Recipe, *, max_batched_tokens: int) -> None:
        self._encoder = model if isinstance(model, Encoder) else None
        self._run = model if isinstance(model, Encoder) else PackedDecoder(model)
        self.config, self.device = model.config, model.embedding.device
        self.recipe = recipe
        self.is_cross = self._encoder is not None and self._encoder.head is not None
        """Whether it gives pairs of texts a score, and no vectors."""
        self._steps = Steps(recipe.steps, model.config.hidden * len(recipe.pooling), self.device)
        most = max_batched_tokens if self.device.type == "cuda" else min(max_batched_tokens, CPU_TOKENS)
        self.max_batched_tokens = most

    @property
    def width(self) -> int:
        """The numbers of a vector; of a cross-encoder, its labels."""
        head = None if self._encoder is None else self._encoder.head
        return self._steps.width if head is None else head.sizes.labels

    @torch.inference_mode()
    def launched(self, texts: Sequence[ReadText]) -> list[Tensor]:
        """Returns the vectors (n, width) of each batch of texts, or the logits of pairs (n, labels), in fp32 on the device.

        It waits for no device.
        """
        return [self._batch(batch) for batch in batches(texts, self.max_batched_tokens)]

    def on_host(self, texts: Sequence[ReadText]) -> Tensor:
        """Returns the vectors (n, width) of texts, or the logits of pairs (n, labels), in fp32 on the host."""
        return torch.cat(self.launched(texts)).cpu()

    def warm_up(self, max_len: int) -> None:
        """Runs batches of the kinds that kernels are compiled apart for, so that no later text waits for a compiler.

        Triton compiles apart for a number that is 1, and for one that 16 divides.
        """
        for lengths in ((1,), (16, 16), (3, 4), (max_len,)):
            self.launched([ReadText([0] * min(length, max_len), [0] * min(length, max_len)) for length in lengths])

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the scores (n,) of a cross-encoder's logits.

        Raises:
            Unsupported: the model has several labels.
        """
        if logits.shape[1] != 1:
            raise Unsupported(f"the model has {logits.shape[1]} labels; a score needs a cross-encoder with one")
        return ACTIVATIONS[self.recipe.score_activation](logits[:, 0])

    def _batch(self, texts: Sequence[ReadText]) -> Tensor:
        tokens = self._sent([token for text in texts for token in text.tokens], torch.int64)
        cu = self._sent([0, *accumulate(len(text.tokens) for text in texts)], torch.int32)
        encoder = self._encoder
        hidden = self._run(tokens, cu) if encoder is None else encoder(tokens, cu, self._types(texts))
        if encoder is not None and encoder.head is not None:
            return encoder.scores(hidden, cu)
        return self._steps(pool(hidden, cu, self.recipe.pooling))

    def _types(self, texts: Sequence[ReadText]) -> Tensor | None:
        """Returns the types of tokens; None where all are 0, or the model has one type."""
        sizes = self.config.encoder
        if sizes is None or sizes.token_types < 2 or all(text.types is None for text in texts):
            return None
        return self._sent([kind for text in texts for kind in text.types or [0] * len(text.tokens)], torch.int64)

    def _sent(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        on_host = torch.tensor(numbers, dtype=dtype)
        if self.device.type != "cuda":
            return on_host
        return on_host.pin_memory().to(self.device, non_blocking=True)


def batches(texts: Sequence[ReadText], most: int) -> Iterator[Sequence[ReadText]]:
    """Yields texts, in their order, in batches of at most `most` tokens; a longer text is alone."""
    first, tokens = 0, 0
    for place, text in enumerate(texts):
        if tokens and tokens + len(text.tokens) > most:
            yield texts[first:place]
            first, tokens = place, 0
        tokens += len(text.tokens)
    if tokens:
        yield texts[first:]


def as_bytes(parts: Sequence[Tensor]) -> bytes:
    """Returns vectors (n, width) as little-endian fp32 numbers, row by row."""
    return torch.cat([*parts]).contiguous().numpy().astype("<f4").tobytes()


def check_dimensions(dimensions: int | None, width: int) -> None:
    """Raises InvalidInput if vectors of `width` numbers cannot be cut to `dimensions`."""
    if dimensions is None:
        return
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or not 1 <= dimensions <= width:
        raise InvalidInput(f"dimensions is {dimensions!r}; the model's vectors may be cut to 1 to {width:,} numbers")


def cut_vectors(vectors: Tensor, dimensions: int | None, *, normalises: bool) -> Tensor:
    """Returns the first numbers of vectors (n, width), which get the length 1 again where the model's have it (Matryoshka).

    Kusupati et al., Matryoshka Representation Learning, arXiv:2205.13147.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    shorter = vectors[:, :dimensions]
    return torch.nn.functional.normalize(shorter, dim=-1) if normalises else shorter.contiguous()
