"""The routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from rooftile import __version__
from rooftile.server.engine.messages import Ready
from rooftile.server.http import schema
from rooftile.server.http.adapters import (
    LoadAdapterForm,
    UnloadAdapterForm,
    check_may_change,
    load_adapter,
    unload_adapter,
)
from rooftile.server.http.anthropic.call import MessagesCall, count_request
from rooftile.server.http.body import read_object
from rooftile.server.http.embedding.routes import EmbeddingRoutes
from rooftile.server.http.errors import HANDLERS, json_answer
from rooftile.server.http.guard import Guard
from rooftile.server.http.intake import Intake, unless_gone
from rooftile.server.http.middleware import RequestMiddleware
from rooftile.server.http.openai.chat_answers import message_of
from rooftile.server.http.openai.complete_answers import CompleteAnswer, best
from rooftile.server.http.openai.conversation import read_messages
from rooftile.server.http.openai.fields import read_form
from rooftile.server.http.openai.forms import ChatForm, CompletionForm, DetokenizeForm, TokenizeForm
from rooftile.server.http.openai.generation import GenerationRequest, chat_request, completion_request
from rooftile.server.http.openai.objects import Objects
from rooftile.server.http.openai.template_options import template_options
from rooftile.server.http.openai.token_ids import answer_ids, prompt_ids
from rooftile.server.http.responder import Responder
from rooftile.server.http.responses.call import ResponsesCall
from rooftile.server.http.responses.store import ResponseStore
from rooftile.server.http.sse import Chunks, EventStream, chunks_of, events_of
from rooftile.server.observe.log import AccessRecord
from rooftile.server.observe.metrics import CONTENT_TYPE
from rooftile.server.refusals import Refusal
from rooftile.server.service import Service

PAGE = Path(__file__).parent.parent / "page"
# the files of the page and their kinds, by path
PAGE_FILES = {
    "/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("page", "talk", "markdown", "live")},
}  # fmt: skip
EMBEDS = "the model was read to embed texts and generates none; ask /v1/embeddings, /v1/rerank or /score"
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Wire(Protocol):
    """An API in whose form a chat is answered."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer of a whole chat."""

    def events(self, chunks: Chunks, access: AccessRecord) -> AsyncGenerator[bytes, None]:
        """Yields the events of a chat's chunks."""


def make_app(service: Service) -> RequestMiddleware:
    """Returns the server's application."""
    routes = Routes(service)
    guard = Guard(service, routes.public)
    # its own routes for a schema and for pages would have no guard
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, dependencies=[Depends(guard)], redirect_slashes=False)
    for method, path, endpoint in routes.table:
        # whoever may GET may ask for the headers alone
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint, methods=methods, response_class=Response, response_model=None)
    for kind, handler in HANDLERS:
        app.add_exception_handler(kind, handler)
    return RequestMiddleware(app, service)


class Routes:
    """The functions behind the paths.

    Args:
        service: the served model and its settings, which they share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._intake = Intake(service)
        self._responses = ResponseStore()
        self.table: list[tuple[str, str, Callable[..., Any]]] = [
            ("POST", "/v1/completions", self.completions), ("POST", "/v1/chat/completions", self.chats),
            ("GET", "/v1/models", self.models), ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/v1/responses", self.responses), ("GET", "/v1/responses/{id}", self.response),
            ("DELETE", "/v1/responses/{id}", self.forget_response), ("POST", "/v1/messages", self.messages),
            ("POST", "/v1/messages/count_tokens", self.count_tokens), ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize), ("GET", "/health", self.health), ("GET", "/ping", self.health),
            ("POST", "/ping", self.health), ("GET", "/version", self.version), ("GET", "/load", self.load),
            ("GET", "/metrics", self.metrics), ("GET", "/openapi.json", self.openapi),
            ("POST", "/v1/load_lora_adapter", self.load_adapter), ("POST", "/v1/unload_lora_adapter", self.unload_adapter),
            *EmbeddingRoutes(service, self._intake).table,
            *(("GET", path, self.page) for path in PAGE_FILES),
        ]  # fmt: skip
        # routes without data of clients
        self.public = (self.health, self.page)

    async def completions(self, request: Request) -> Response:
        """Continues prompts."""
        return await self._answer(request, lambda given, ready: completion_request(read_form(CompletionForm, given), ready))

    async def chats(self, request: Request) -> Response:
        """Answers a conversation."""
        return await self._answer(request, lambda given, ready: chat_request(read_form(ChatForm, given), ready))

    async def responses(self, request: Request) -> Response:
        """Answers an input of items, in the form of OpenAI's newer API."""
        name, access = self._service.settings.served_model_name, request.state.access
        call = ResponsesCall(self._responses, access, name, int(time.time()))
        return await self._answer(request, call.read, call)

    async def response(self, request: Request) -> Response:
        """Returns a response that is kept."""
        return json_answer(self._responses.find(request.state.access.key, request.path_params["id"]).response)

    async def forget_response(self, request: Request) -> Response:
        """Forgets a response that is kept."""
        id = request.path_params["id"]
        self._responses.remove(request.state.access.key, id)
        return json_answer({"id": id, "object": "response", "deleted": True})

    async def messages(self, request: Request) -> Response:
        """Answers a conversation in Anthropic's form."""
        thinks = self._service.check()[1].thoughts is not None
        call = MessagesCall(request.state.access, self._service.settings.served_model_name, thinks=thinks)
        return await self._answer(request, call.read, call)

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a conversation in Anthropic's form."""
        _, texts, ready = self._service.check()

        def read(given: dict[str, Any]) -> GenerationRequest:
            self._intake.check_model(given.get("model"))
            return count_request(given, ready)

        generation = await read_object(request, self._service.bodies, read)
        (tokens,) = await generation.tokens(texts)
        return json_answer({"input_tokens": len(tokens)})

    async def models(self, request: Request) -> Response:
        """Lists the model and its adapters."""
        return json_answer({"object": "list", "data": [self._service.facts(), *self._service.adapter_facts()]})

    async def model(self, request: Request) -> Response:
        """Describes the model, or an adapter."""
        name = request.path_params["name"]
        self._intake.check_model(name)
        return json_answer(next((each for each in self._service.adapter_facts() if each["id"] == name), self._service.facts()))

    async def load_adapter(self, request: Request) -> Response:
        """Loads an adapter from the server's folder of adapters."""
        check_may_change(self._service)
        form = await read_object(request, self._service.bodies, partial(read_form, LoadAdapterForm))
        await load_adapter(self._service, form)
        return json_answer({"loaded": form.lora_name})

    async def unload_adapter(self, request: Request) -> Response:
        """Unloads an adapter; answers that have begun end with it."""
        check_may_change(self._service)
        form = await read_object(request, self._service.bodies, partial(read_form, UnloadAdapterForm))
        await unload_adapter(self._service, form)
        return json_answer({"unloaded": form.lora_name})

    async def tokenize(self, request: Request) -> Response:
        """Returns the token ids of a prompt or of a conversation."""
        _, texts, ready = self._service.check()
        form, messages = await read_object(request, self._service.bodies, self._read_tokenize)
        if messages is None:
            tokens = await texts.encode(form.prompt or "", special=form.add_special_tokens is not False)
        else:
            tokens = await texts.chat(messages, special=form.add_special_tokens is True, **template_options(form))
        strings = {"token_strs": await texts.strings(tokens)} if form.return_token_strs else {}
        return json_answer({"tokens": tokens, "count": len(tokens), "max_model_len": ready.max_len} | strings)

    async def detokenize(self, request: Request) -> Response:
        """Returns the text of token ids."""
        _, texts, ready = self._service.check()

        def read(given: dict[str, Any]) -> DetokenizeForm:
            form = read_form(DetokenizeForm, given)
            self._intake.check_model(form.model)
            ids = form.tokens
            if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < ready.vocabulary for each in ids):
                raise Refusal("invalid_value", f"tokens must be a list of ids from 0 to {ready.vocabulary - 1}", param="tokens")
            return form

        form = await read_object(request, self._service.bodies, read)
        return json_answer({"prompt": await texts.decode(form.tokens, skip_special=form.skip_special_tokens)})

    async def health(self, request: Request) -> Response:
        """Says whether requests are answered."""
        return json_answer(self._service.health())

    async def version(self, request: Request) -> Response:
        """Says which version answers."""
        return json_answer({"version": __version__})

    async def load(self, request: Request) -> Response:
        """Returns how many prompts wait or run."""
        return json_answer({"server_load": self._service.admission.running})

    async def metrics(self, request: Request) -> Response:
        """Returns Prometheus's series."""
        return Response(self._service.scrape(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """Describes the routes."""
        return json_answer(schema.document())

    async def page(self, request: Request) -> Response:
        """Returns a file of the page."""
        name, kind = PAGE_FILES[request.scope["route"].path]
        return FileResponse(PAGE / name, media_type=kind, headers={"Content-Security-Policy": _POLICY})

    async def _answer(
        self, request: Request, read: Callable[[dict[str, Any], Ready], GenerationRequest], wire: Wire | None = None
    ) -> Response:
        service, access = self._service, request.state.access
        _, _, ready = service.check()
        if ready.embedding is not None:
            raise Refusal("unsupported", EMBEDS)

        def read_generation(given: dict[str, Any]) -> GenerationRequest:
            found = read(given, ready)
            name = given.get("model")
            found.adapter = name if isinstance(name, str) and name in service.adapters else None
            return found

        generation, deadline = await self._intake.read(request, read_generation)
        if service.settings.log_prompts:
            access.prompt = str(generation.messages or generation.prompts)
        responder = Responder(service, generation, access, deadline)
        name = generation.adapter or service.settings.served_model_name
        objects = Objects(access.id, name, int(time.time()), chat=generation.chat)
        try:
            await unless_gone(request.receive, responder.begin())
            if generation.stream:
                chunks = chunks_of(responder, objects)
                events = events_of(chunks, access) if wire is None else wire.events(chunks, access)
                return EventStream(events, responder.close, access, responder.usage.headers())
            found = await unless_gone(request.receive, whole(responder, objects))
            return json_answer(found if wire is None else wire.whole(found), headers=responder.usage.headers())
        except BaseException:
            responder.close()
            raise
        finally:
            if not generation.stream:
                responder.close()

    def _read_tokenize(self, given: dict[str, Any]) -> tuple[TokenizeForm, list[dict[str, Any]] | None]:
        """Returns the form of /tokenize, and its messages if it has some in place of a prompt."""
        form = read_form(TokenizeForm, given)
        self._intake.check_model(form.model)
        if (form.prompt is None) == (form.messages is None):
            raise Refusal("invalid_value", "the body must have a prompt or messages, and not both", param="prompt")
        return form, None if form.messages is None else read_messages(form.messages)


async def whole(responder: Responder, objects: Objects) -> dict[str, Any]:
    """Waits for all answers; returns them in OpenAI's form."""
    generation = responder.generation
    answers: dict[tuple[int, int], CompleteAnswer] = {}
    async for place, news in responder.news():
        for piece in news.pieces:
            answer = answers.setdefault((place, piece.index), CompleteAnswer())
            if generation.chat:
                # before the piece is added: calls decide how an answer has ended
                answer.parts.add(responder.read(place, piece))
            answer.add(piece)
    choices = []
    for place in range(len(responder.tokens)):
        several = [answers[key] for key in sorted(answers) if key[0] == place]
        chosen = best(several, generation.n) if len(several) > generation.n else several
        for index, answer in enumerate(chosen):
            echo, logprobs = generation.echoes[place] if generation.echo else "", None
            if generation.logprobs is not None:
                before = responder.echoed(place) if generation.echo else None
                logprobs = objects.logprobs(answer.logprobs, answer.offsets, start=len(echo), before=before)
            text = echo + answer.text
            said = message_of(answer.parts, thoughts=generation.thoughts) if generation.chat else text
            made = objects.choice(place * generation.n + index, said, answer.finish, answer.stop, logprobs)
            made |= answer_ids(responder, answer.logprobs)
            choices.append(made if generation.chat else made | responder.listed(place) | prompt_ids(responder, place))
    found = objects.whole(choices, responder.usage.object())
    # in vLLM's places
    return found | responder.listed(0) | prompt_ids(responder, 0) if generation.chat else found
