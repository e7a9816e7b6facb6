"""The messages between the server's process and the engine's. msgspec checks every type when a message is read.

What is made for each token of each answer holds no cycle, and is hidden from the garbage collector.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rooftile.engine.requests.stats import EngineStats

FAILED = 70
"""The exit code of an engine that has failed, and of its server."""


class Add(Struct, tag="add"):
    """A request. `params` are keywords of `SamplingParams`."""

    id: int
    prompt: list[int]
    params: dict[str, Any]
    salt: str = ""
    streams: bool = True
    """Whether news is sent after each step, or only when all answers are complete."""
    adapter: str | None = None
    """The name of the adapter that answers; None for the model as it is."""


class Abort(Struct, tag="abort"):
    """Ends a request whose client has gone, or whose time is over."""

    id: int


class ChangeAdapter(Struct, tag="adapter"):
    """Loads an adapter from a folder, or with None unloads it."""

    id: int
    name: str
    path: str | None


Order = Add | Abort | ChangeAdapter


class Reading(Struct, tag="reading"):
    """How much of the model's weights has been read."""

    percent: int


class EmbeddingFacts(Struct):
    """The facts of a model that embeds texts and generates none."""

    folder: str
    """The model's folder, with its files of sentence-transformers."""
    causal: bool
    """Whether it is a decoder."""
    width: int
    """The numbers of a vector; of a cross-encoder its labels."""
    is_cross: bool
    """Whether it scores pairs of texts, and gives no vectors."""


class Ready(Struct, tag="ready"):
    """The engine takes orders from now on."""

    cache: str
    folder: str | None
    """The folder of the tokenizer; None if the model has no tokenizer."""
    max_len: int
    vocabulary: int
    max_answers: int
    blocks: int
    block_size: int
    defaults: dict[str, Any]
    """Sampling parameters that the checkpoint recommends."""
    has_template: bool = False
    embedding: EmbeddingFacts | None = None
    """What a model that generates nothing does."""


class Scored(Struct, array_like=True, gc=False):
    """A token with its logprob."""

    id: int
    logprob: float
    text: str
    raw: bytes | None = None
    """The token's bytes where its text does not tell them: half of a character."""


class Ranked(Struct, array_like=True, gc=False):
    """The logprob and rank of a prompt's token, and the most likely tokens in its place with their logprobs."""

    logprob: float
    rank: int
    ids: list[int]
    logprobs: list[float]


class AnswerPiece(Struct, array_like=True, gc=False):
    """The growth of one answer since the last message about it."""

    index: int
    text: str
    tokens: int
    """How many tokens the whole answer has so far."""
    logprobs: list[list[Scored]] | None = None
    """For each new token: the token itself, then the most likely ones; None if they were not asked for."""
    finish: str | None = None
    stop: int | str | None = None
    logprob: float | None = None
    """The sum of the answer's logprobs, if they were asked for."""
    score: float | None = None
    ids: list[int] | None = None
    """The new tokens that belong to the text, where the server's process makes the text; None where it is in `text`."""
    offsets: list[int] | None = None
    """For each token in `logprobs`, the characters of the answer's text before it."""


class News(Struct, array_like=True, gc=False):
    """The growth of a request's answers."""

    id: int
    pieces: list[AnswerPiece]
    finished: bool = False
    cached: int = 0
    """Tokens of the prompt that the prefix cache had."""
    error: str | None = None
    prompt: list[Ranked] | None = None
    """The prompt's tokens but the first, once, where their logprobs are asked for."""
    paged: int = 0
    """Tokens of the prompt whose blocks the prefix cache had; more than `cached` where no state was kept."""
    vectors: bytes | None = None
    """The vectors of a request's texts, or the scores of its pairs, one after the other in fp32, little-endian."""


class RequestRefused(Struct, array_like=True):
    """A request that the engine cannot take, with the sentence that says why."""

    id: int
    reason: str
    ours: bool = False
    """Whether the engine is to blame, and not the request."""


class AdapterChanged(Struct, array_like=True):
    """The end of a `ChangeAdapter`; `reason` says why it was refused."""

    id: int
    reason: str | None


class StepNews(Struct, tag="step"):
    """All that has happened in one step; or, with no news in it, that the engine is alive."""

    stats: EngineStats
    taken: list[int] = []
    refused: list[RequestRefused] = []
    started: list[int] = []
    """Requests that wait no longer: the model reads their prompts."""
    news: list[News] = []
    adapters: list[AdapterChanged] = []


class Failed(Struct, tag="failed"):
    """The engine has failed and its process ends; `wrong` says that a setting or the model was wrong."""

    reason: str
    wrong: bool = False


Report = Reading | Ready | StepNews | Failed
