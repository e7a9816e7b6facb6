"""`EmbeddingRoutes`: the functions behind the paths that embed, rank and score texts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from rooftile.engine.embedding.folder import query_prompts
from rooftile.engine.embedding.reading import ReadText, TextReader
from rooftile.server.engine.messages import EmbeddingFacts
from rooftile.server.http.embedding.call import EmbeddingCall
from rooftile.server.http.embedding.forms import Embedding, EmbeddingForm, RerankForm, ScoreForm
from rooftile.server.http.embedding.input import list_documents, list_inputs, list_texts
from rooftile.server.http.intake import Intake, unless_gone
from rooftile.server.http.openai.fields import read_form
from rooftile.server.refusals import Refusal
from rooftile.server.service import Service

if TYPE_CHECKING:
    from rooftile.server.http.embedding.answers import Vectors

Form = TypeVar("Form", bound=Embedding)


class EmbeddingRoutes:
    """Embeds, ranks and scores texts.

    Args:
        service: the served model and its settings.
        intake: reads requests.
    """

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service, self._intake = service, intake
        self.table: list[tuple[str, str, Callable[..., Any]]] = [
            ("POST", "/v1/embeddings", self.embeddings), ("POST", "/rerank", self.rank), ("POST", "/v1/rerank", self.rank),
            ("POST", "/v2/rerank", self.rank), ("POST", "/score", self.score), ("POST", "/v1/score", self.score),
        ]  # fmt: skip

    async def embeddings(self, request: Request) -> Response:
        """Returns the vectors of texts."""

        async def answer(form: EmbeddingForm, call: EmbeddingCall, facts: EmbeddingFacts) -> bytes:
            if facts.is_cross:
                raise Refusal("unsupported", "the model is a cross-encoder, which gives no vectors; ask /v1/rerank or /score")
            inputs = list_inputs(form.input)
            if form.dimensions is not None and not 1 <= form.dimensions <= facts.width:
                why = f"dimensions is {form.dimensions}; the model's vectors may be cut to 1 to {facts.width:,} numbers"
                raise Refusal("invalid_value", why, param="dimensions")
            cut, prompt_name = form.truncate_prompt_tokens, form.prompt_name
            vectors = await call.vectors(lambda reader: reader.read(inputs, prompt_name=prompt_name, cut=cut))
            from rooftile.server.http.embedding import answers

            name, normalises = self._service.settings.served_model_name, self._service.reader.recipe.normalises
            return await call.in_thread(lambda: answers.embeddings(vectors, form, call.tokens, name, normalises=normalises))

        return await self._answer(request, EmbeddingForm, answer)

    async def rank(self, request: Request) -> Response:
        """Returns documents, those first that answer a query best."""

        async def answer(form: RerankForm, call: EmbeddingCall, facts: EmbeddingFacts) -> bytes:
            documents = list_documents(form.documents)
            if form.top_n is not None and form.top_n < 1:
                raise Refusal("invalid_value", f"top_n is {form.top_n}; must be at least 1", param="top_n")
            scores = await self._scores(call, facts, [form.query], documents, form.truncate_prompt_tokens)
            from rooftile.server.http.embedding import answers

            name = self._service.settings.served_model_name
            return answers.ranking(scores, documents, form, call.tokens, name, request.state.access.id)

        return await self._answer(request, RerankForm, answer)

    async def score(self, request: Request) -> Response:
        """Returns the scores of pairs of texts."""

        async def answer(form: ScoreForm, call: EmbeddingCall, facts: EmbeddingFacts) -> bytes:
            first, second = list_texts("text_1", form.text_1), list_texts("text_2", form.text_2)
            if len(first) not in (1, len(second)):
                why = f"text_1 has {len(first)} texts and text_2 {len(second)}; must have one, or as many"
                raise Refusal("invalid_value", why, param="text_1")
            scores = await self._scores(call, facts, first, second, form.truncate_prompt_tokens)
            from rooftile.server.http.embedding import answers

            name, id = self._service.settings.served_model_name, request.state.access.id
            return answers.scored(scores, call.tokens, name, id, int(time.time()))

        return await self._answer(request, ScoreForm, answer)

    async def _scores(
        self, call: EmbeddingCall, facts: EmbeddingFacts, queries: list[str], documents: list[str], cut: int | None
    ) -> list[float]:  # fmt: skip
        """Returns the score of each document with the query, or with its own."""
        if facts.is_cross and facts.width != 1:
            why = f"the model has {facts.width} labels; a score needs a cross-encoder with one"
            raise Refusal("unsupported", why)
        each = queries * len(documents) if len(queries) == 1 else queries

        def pairs(reader: TextReader) -> Sequence[ReadText]:
            return [reader.pair(one, other, cut=cut) for one, other in zip(each, documents, strict=True)]

        def texts(reader: TextReader) -> Sequence[ReadText]:
            asked, found = query_prompts(reader.recipe)
            return [*reader.read(queries, prompt_name=asked, cut=cut), *reader.read(documents, prompt_name=found, cut=cut)]

        found: Vectors = await call.vectors(pairs if facts.is_cross else texts)
        from rooftile.server.http.embedding import answers

        first, second = found[: len(queries)], found[len(queries) :]
        return await call.in_thread(lambda: answers.cosines(first, second) if not facts.is_cross else found[:, 0].tolist())

    async def _answer(
        self, request: Request, kind: type[Form], answer: Callable[[Form, EmbeddingCall, EmbeddingFacts], Awaitable[bytes]]
    ) -> Response:
        service, access = self._service, request.state.access
        _, _, ready = service.check()
        if ready.embedding is None:
            raise Refusal(
                "unsupported", "the model was read to generate text and embeds none; start `rooftile serve` with --task embed"
            )
        form, deadline = await self._intake.read(request, partial(read_form, kind))
        if service.settings.log_prompts:
            access.prompt = str(form.model_dump(exclude_none=True))
        call = EmbeddingCall(service, access, deadline, kind.texts)
        try:
            found = await unless_gone(request.receive, answer(form, call, ready.embedding))
        finally:
            call.close()
        return Response(found, media_type="application/json")
