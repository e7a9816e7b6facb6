"""The ingress: the server's application in a replica of Ray Serve, whose proxy listens."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from rooftile.server.http.app import make_app
from rooftile.server.on_ray.engines import RayEngines
from rooftile.server.service import Service
from rooftile.server.settings import ServerSettings

ENGINE = "Engine"


class Started:
    """An application whose service begins and ends with its process.

    Args:
        app: the routes.
        service: what is begun.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or begins and ends the service."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        if not await self._service.start():
            await send({"type": "lifespan.startup.failed", "message": "no engine answers"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._service.close()
        await send({"type": "lifespan.shutdown.complete"})


def ingress(settings: ServerSettings) -> Callable[[], ASGIApp]:
    """Returns what makes the application in the replica's process."""

    def make() -> ASGIApp:
        # here: the process that deploys has no replica, and a worker imports this module anew
        from ray import serve

        def start() -> RayEngines:
            handle = serve.get_deployment_handle(ENGINE, app_name=serve.get_replica_context().app_name)
            shares = settings.engine.get("enable_prefix_caching", True)
            return RayEngines(
                handle, stall_s=settings.stall_s, shares_prefixes=shares, noted=service.metrics.note_stats,
                changed=service.count_engines, adapters=service.adapters,
            )  # fmt: skip

        service = Service(settings, start)
        return Started(make_app(service), service)

    return make
