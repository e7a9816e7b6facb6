"""`rooftile serve --cluster ray`: runs the application on a cluster that is there, until a signal comes."""

from __future__ import annotations

import re
import signal
import threading

from rooftile.errors import InvalidInput
from rooftile.server.engine.messages import FAILED
from rooftile.server.observe.log import log, start_log
from rooftile.server.on_ray.application import application, needed
from rooftile.server.settings import ServerSettings

NAME = "rooftile"


def run(settings: ServerSettings) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code: 0, or 70 if the application could not be started.

    Raises:
        InvalidInput: Ray is not installed, there is no cluster, or it has no room.
    """
    ray, serve = needed()
    start_log(as_json=settings.json_log, queued=True)
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError:
            raise InvalidInput("no Ray cluster is there; start one with `ray start --head`, or name one in RAY_ADDRESS") from None
    made = application(settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # a Ray Serve that runs already keeps its address
    serve.start(http_options={"host": settings.host, "port": settings.port})
    try:
        serve.run(made, name=NAME, route_prefix="/")
    except RuntimeError as error:
        failed = serve.status().applications[NAME].deployments.values()
        reasons = [reason_of(each.message) for each in failed if each.message]
        log.error("the application could not be started: %s", "; ".join(reasons) or error)
        serve.delete(NAME)
        return FAILED
    log.info("ready: http://%s:%d; model %s on a cluster", settings.host, settings.port, settings.served_model_name)
    stop.wait()
    # replicas have --drain seconds for what they answer
    serve.delete(NAME)
    log.info("stopped")
    return 0


def reason_of(message: str) -> str:
    """Returns the sentence of an exception, at whose traceback's end Ray has it."""
    return re.sub(r"^[\w.]+: ", "", message.strip().rpartition("\n")[2])
