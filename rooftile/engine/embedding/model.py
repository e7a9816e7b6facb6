"""`EmbeddingModel`: a model that embeds and scores texts, alone or beside an engine that generates with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.engine.embedding.embedder import Embedder, check_dimensions, cut_vectors
from rooftile.engine.embedding.folder import MODULES, Recipe, query_prompts, recipe_of
from rooftile.engine.embedding.output import EmbeddingOutput, ScoreOutput
from rooftile.engine.embedding.reading import ReadText, TextReader, not_finite
from rooftile.engine.engine import Engine
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.start.blueprint import Model, current_device, find_device, longest_sequence
from rooftile.engine.start.tokenizers import find_tokenizer
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder, Encoder, ModelConfig
from rooftile.models.placement import Placement
from rooftile.runtime.arguments import python_number

Text = str | Sequence[int]
# texts that are encoded together, before a device reads them
ENCODED = 256


class EmbeddingModel:
    """Reads texts, and gives vectors and scores.

    Args:
        embedder: the model.
        tokenizer: the tokenizer, or None.
        max_len: the longest text in tokens.
        is_alone: whether nothing but this is made of the model.
    """

    def __init__(self, embedder: Embedder, tokenizer: Tokenizer | None, max_len: int, *, is_alone: bool) -> None:
        self.embedder, self.tokenizer, self.is_alone = embedder, tokenizer, is_alone
        self.reader = TextReader(tokenizer, embedder.recipe, max_len, embedder.config.vocab_size)

    def __repr__(self) -> str:
        embedder = self.embedder
        what = f"scores of {embedder.width} labels" if embedder.is_cross else f"vectors of {embedder.width:,} numbers"
        return f"{embedder.config.family} on {embedder.device}; {what}; at most {self.reader.max_len:,} tokens per text"

    def embed(
        self, texts: Sequence[Any], *, prompt_name: str | None, dimensions: int | None, cut: int | None
    ) -> list[EmbeddingOutput]:
        """See `LLM.embed`."""
        recipe = self.embedder.recipe
        if self.embedder.is_cross:
            raise Unsupported("the model is a cross-encoder, which scores pairs of texts and gives no vectors; ask it with score")
        dimensions = python_number(dimensions)
        check_dimensions(dimensions, self.embedder.width)
        recipe.prompt(prompt_name)
        read = (self.reader.read(some, prompt_name=prompt_name, cut=cut) for some in _some_at_a_time(texts))
        whole, sizes = self._finite(read)
        vectors = cut_vectors(whole, dimensions, normalises=recipe.normalises)
        return [EmbeddingOutput(vector, size) for vector, size in zip(vectors, sizes, strict=True)]

    def score(self, query: str | Sequence[str], documents: str | Sequence[str], *, cut: int | None) -> list[ScoreOutput]:
        """See `LLM.score`."""
        queries, answers = _listed("query", query), _listed("documents", documents)
        if len(queries) not in (1, len(answers)):
            raise InvalidInput(f"there are {len(queries)} queries for {len(answers)} documents; give one, or one for each")
        if self.embedder.is_cross:
            each = queries * len(answers) if len(queries) == 1 else queries
            pairs = [self.reader.pair(one, other, cut=cut) for one, other in zip(each, answers, strict=True)]
            logits, sizes = self._finite([pairs])
            return _outputs(self.embedder.scores(logits), sizes)
        asked, found = query_prompts(self.embedder.recipe)
        read = [self.reader.read(some, prompt_name=name, cut=cut) for some, name in ((queries, asked), (answers, found))]
        vectors, sizes = self._finite(read)
        first, second = vectors.split([len(queries), len(answers)])
        first_sizes = sizes[: len(queries)] * (len(answers) if len(queries) == 1 else 1)
        tokens = [one + other for one, other in zip(first_sizes, sizes[len(queries) :], strict=True)]
        return _outputs(functional.cosine_similarity(first, second), tokens)

    def _finite(self, texts: Iterable[Sequence[ReadText]]) -> tuple[Tensor, list[int]]:
        """Returns the vectors of texts, and their tokens; refuses a vector that has nan or infinity.

        A device reads some of the texts while the next are encoded.
        """
        found, sizes = [], []
        with current_device(self.embedder.device):
            for some in texts:
                found += self.embedder.launched(some)
                sizes += [len(each.tokens) for each in some]
            vectors = torch.cat(found).cpu() if found else torch.empty(0, self.embedder.width)
        broken = torch.nonzero(~vectors.isfinite().all(dim=1))
        if len(broken):
            raise InvalidInput(not_finite(int(broken[0])))
        return vectors, sizes


def _listed(name: str, texts: Any) -> list[str]:
    """Returns the texts of an argument, a single one or several.

    Raises:
        InvalidInput: it is neither.
    """
    # a mapping would be its keys, and a set has no order
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | Mapping | Set):
        raise InvalidInput(f"{name} is {repr(texts)[:80]}; must be a text, or a list of texts")
    several = [texts] if isinstance(texts, str) else list(texts)
    for place, text in enumerate(several):
        if not isinstance(text, str):
            raise InvalidInput(f"{name} has {repr(text)[:80]} at place {place}; must be a text")
    return several


def _some_at_a_time(texts: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (texts[first : first + ENCODED] for first in range(0, len(texts), ENCODED))


def embeds(model: Model, config: EngineConfig) -> bool:
    """Tells whether a model is read to embed, and not to generate.

    Raises:
        InvalidInput: an encoder is asked to generate.
    """
    if isinstance(model, str | Path):
        shape, asks = ModelConfig.from_folder(model), (Path(model) / MODULES).is_file()
    else:
        shape, asks = model if isinstance(model, ModelConfig) else model.config, False
    if config.task == "generate" and (shape.encoder is not None or not shape.head):
        what = "an encoder" if shape.encoder is not None else "a decoder without an output head"
        raise InvalidInput(f'task is "generate" and the model is {what}, {shape.family}, which embeds texts; leave task out')
    if config.task == "auto":
        return asks or shape.encoder is not None or not shape.head
    return config.task == "embed"


def read_embedding_model(model: Model, config: EngineConfig) -> EmbeddingModel:
    """Reads a model that embeds and does nothing else.

    Raises:
        InvalidInput: the folder holds no model that can be read.
        Unsupported: a setting is of engines that generate, or the model has layers that are not read without a cache.
    """
    if config.ranks > 1:
        raise Unsupported("several ranks share a model that generates; texts are embedded by one: leave tensor_parallel_size out")
    device = find_device(model, config)
    if isinstance(model, str | Path):
        shape = ModelConfig.from_folder(model)
        recipe = recipe_of(Path(model), causal=shape.encoder is None)
    else:
        shape = model.config if isinstance(model, Decoder) else model
        recipe = _default(shape)
    max_len = _longest(shape, config, recipe)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else shape.dtype
    network: Encoder | Decoder
    if shape.encoder is not None:
        if config.weights != "auto":
            raise Unsupported(f"weights is {config.weights!r} and the model is an encoder; encoders are read in 16 or 32 bits")
        if isinstance(model, str | Path):
            network = Encoder.from_folder(model, dtype, device, max_len=max_len)
        else:
            network = Encoder.random(shape, dtype, device)
    elif isinstance(model, Decoder):
        network = model
    elif isinstance(model, ModelConfig):
        network = Decoder.random(replace(shape, head=False, tie=True), placement=Placement(dtype, device))
    else:
        network = Decoder.from_folder(
            model, max_len=max_len, weights=config.weights, placement=Placement(dtype, device), headless=True
        )
    embedder = Embedder(network, recipe, max_batched_tokens=config.max_batched_tokens)
    if device.type == "cuda":
        with current_device(device):
            embedder.warm_up(max_len)
    return EmbeddingModel(embedder, find_tokenizer(model, config), max_len, is_alone=True)


def beside_engine(model: Model, engine: Engine, config: EngineConfig) -> EmbeddingModel:
    """Returns the decoder of an engine as a model that embeds, too."""
    decoder = engine.runner.decoder
    recipe = recipe_of(Path(model), causal=True) if isinstance(model, str | Path) else _default(decoder.config)
    embedder = Embedder(decoder, recipe, max_batched_tokens=config.max_batched_tokens)
    longest = engine.max_len if recipe.longest is None else min(engine.max_len, recipe.longest)
    return EmbeddingModel(embedder, engine.tokenizer, longest, is_alone=False)


def _default(shape: ModelConfig) -> Recipe:
    return Recipe(pooling=("lasttoken",) if shape.encoder is None else ("mean",))


def _longest(shape: ModelConfig, config: EngineConfig, recipe: Recipe) -> int:
    """Returns the longest text in tokens: as asked, or as the folder says."""
    longest = longest_sequence(shape, config)
    if config.max_model_len is None and recipe.longest is not None:
        longest = min(longest, recipe.longest)
    return longest


def _outputs(scores: Tensor, tokens: Sequence[int]) -> list[ScoreOutput]:
    return [ScoreOutput(score, size) for score, size in zip(scores.tolist(), tokens, strict=True)]
