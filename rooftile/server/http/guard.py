"""Who may come in: keys, by the one dependency of the application, so that no route is forgotten; hosts; and pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request

from rooftile.server.refusals import Refusal
from rooftile.server.service import Service
from rooftile.server.settings import ServerSettings, is_loopback

Headers = list[tuple[bytes, bytes]]

# seconds for which a browser remembers what it was told
_REMEMBERED = b"600"
_SHOWN = b"x-request-id, x-max-tokens, retry-after"


def check_host(host: str, settings: ServerSettings) -> None:
    """Refuses a Host header of elsewhere: a page in a browser may have let its own name point at this machine.

    Raises:
        Refusal: with status 403.
    """
    if not settings.on_loopback and not settings.allowed_hosts:
        return
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    # names of hosts are the same in capitals
    allowed = {each.lower() for each in settings.allowed_hosts}
    if is_loopback(name.lower()) or not allowed.isdisjoint((host.lower(), name.lower())):
        return
    raise Refusal("host_not_allowed", f"the Host header is {host[:80]!r}; give it to the server as --allowed-host")


class Guard:
    """Asks for a key on every route, but for the few functions that are named as public.

    A path is never looked at: the function that the router has found decides. So neither a strange spelling of a path nor a new
    route can pass by.

    Args:
        service: the server.
        public: the functions of routes that are open to all.
    """

    def __init__(self, service: Service, public: Collection[Any]) -> None:
        self._keys = service.settings.keys
        self._public = frozenset(public)

    async def __call__(self, request: Request) -> None:
        """Lets a request in.

        Raises:
            Refusal: with status 401.
        """
        # a coroutine: FastAPI runs a plain function in a thread, and the way there takes longer than the check
        if request.scope.get("endpoint") in self._public:
            return
        # Anthropic's clients have a header of their own
        own = request.headers.get("x-api-key")
        name = self._keys.name_of(request.headers.get("authorization") or (own and f"Bearer {own}"))
        if name is None:
            why = "the request has no valid API key; send it as Authorization: Bearer KEY, or as X-Api-Key: KEY"
            raise Refusal("invalid_api_key", why, headers={"WWW-Authenticate": "Bearer"})
        request.state.access.key = name


class Origins:
    """The origins whose pages may send requests from a browser and read their answers (CORS).

    Args:
        allowed: origins such as "https://a.example", or "*"; empty for no page.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(each.encode() for each in allowed)

    def headers(self, sent: Mapping[bytes, bytes]) -> Headers:
        """Returns the headers that let the page which has sent a request read its answer.

        Args:
            sent: the request's headers.
        """
        if not self._allowed:
            return []
        # a cache must not give one page's answer to another
        found = [(b"vary", b"origin")]
        origin = sent.get(b"origin")
        if origin is not None and (b"*" in self._allowed or origin.lower() in self._allowed):
            found += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _SHOWN)]
        return found

    def preflight(self, method: str, sent: Mapping[bytes, bytes]) -> Headers | None:
        """Returns a preflight's answer, besides `headers`; None if it is none, or of a page that may not ask."""
        is_allowed = len(self.headers(sent)) > 1
        if method != "OPTIONS" or b"access-control-request-method" not in sent or not is_allowed:
            return None
        found = [(b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"), (b"access-control-max-age", _REMEMBERED)]
        # browsers take no * for Authorization, so what is asked for is named
        if b"access-control-request-headers" in sent:
            found.append((b"access-control-allow-headers", sent[b"access-control-request-headers"]))
        if b"access-control-request-private-network" in sent:
            found.append((b"access-control-allow-private-network", b"true"))
        return found
