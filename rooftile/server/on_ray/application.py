"""The application of Ray Serve: an ingress, and a deployment with a replica for each engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rooftile.engine.settings.table import SETTINGS, ranks_of
from rooftile.errors import InvalidInput
from rooftile.server.keys import read_keys
from rooftile.server.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve import Application

# answers that Ray sends to a replica at once, beyond what may run and wait there by our limits: these refuse first
SPARE = 64


def needed() -> tuple[ModuleType, ModuleType]:
    """Returns Ray and Ray Serve.

    Raises:
        InvalidInput: they are not installed.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise InvalidInput(f"a cluster needs Ray ({error.name} is missing); pip install 'ray[serve]'") from None
    return ray, serve


def settings_of(options: Mapping[str, Any], api_key_file: str | Path | None = None) -> ServerSettings:
    """Returns a server's settings from its own and its engines' in one dictionary.

    Raises:
        InvalidInput: a name is unknown, or a value makes no sense.
    """
    own = {each.name for each in dataclasses.fields(ServerSettings)} - {"engine", "keys"}
    unknown = sorted(set(options) - own - set(SETTINGS))
    if unknown:
        raise InvalidInput(f"app has no option {unknown[0]!r}; its options are those of `rooftile serve` and of LLM")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in own}
    engine = {name: value for name, value in options.items() if name not in own}
    keys = read_keys(None if api_key_file is None else Path(api_key_file))
    return ServerSettings(**given, keys=keys, engine=engine, on_cluster=True)


def check_room(count: int, gpus: int, there: Mapping[str, float], *, on_cpu: bool) -> None:
    """Checks that a cluster has room for engines.

    Args:
        count: how many engines there are.
        gpus: GPUs of each.
        there: the cluster's resources.
        on_cpu: whether they take no GPU.

    Raises:
        InvalidInput: it has too little.
    """
    name, each = ("CPU", 1) if on_cpu else ("GPU", gpus)
    have = int(there.get(name, 0))
    if have < count * each:
        raise InvalidInput(f"{count} replicas of {each} {name}{'s' * (each > 1)} ask for {count * each}; the cluster has {have}")


def application(settings: ServerSettings) -> Application:
    """Returns the application; checks the room if Ray is connected to a cluster.

    Raises:
        InvalidInput: Ray is not installed, or the cluster has no room.
    """
    ray, serve = needed()
    from rooftile.server.on_ray.engine import Engine
    from rooftile.server.on_ray.ingress import ENGINE, ingress

    gpus = ranks_of(settings.engine)
    there = ray.cluster_resources() if ray.is_initialized() else {}
    on_cpu = settings.engine.get("device") == "cpu" or (bool(there) and not there.get("GPU"))
    if there:
        check_room(settings.replicas, gpus, there, on_cpu=on_cpu)
    options: dict[str, Any] = {}
    try:
        from ray.serve.config import RequestRouterConfig

        from rooftile.server.on_ray.router import PrefixRouter

        options["request_router_config"] = RequestRouterConfig(request_router_class=PrefixRouter)
    except ImportError:
        # this part of Ray is alpha; without it the less loaded of two replicas answers
        pass
    # an engine's GPUs are on one machine, and its process has them all
    actor = {"num_cpus": 1, "num_gpus": 0 if on_cpu else gpus}
    most = settings.engine.get("max_num_seqs", SETTINGS["max_num_seqs"].default) + settings.max_waiting + SPARE
    engine = serve.deployment(
        Engine, name=ENGINE, num_replicas=settings.replicas, ray_actor_options=actor, max_ongoing_requests=most,
        max_queued_requests=most, graceful_shutdown_timeout_s=settings.drain_s, health_check_period_s=2.0, **options,
    )  # fmt: skip
    door = serve.deployment(
        serve.ingress(ingress(settings))(), name="Ingress", max_ongoing_requests=2 * most * settings.replicas,
        graceful_shutdown_timeout_s=settings.drain_s,
    )  # fmt: skip
    own = {"model": settings.model, "json_log": settings.json_log} | settings.engine
    return door.bind(engine.bind(own, settings.stall_s))
