"""The application of Ray Serve: an ingress, and a deployment with a replica for each engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rooftile import __version__
from rooftile.engine.settings.table import SETTINGS, ranks_of
from rooftile.errors import InvalidInput
from rooftile.server.keys import read_keys
from rooftile.server.on_ray.nodes import STRATEGIES, check_room
from rooftile.server.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingConfig

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


def scaling_of(given: Mapping[str, Any]) -> AutoscalingConfig:
    """Returns Ray's configuration of a number of replicas that follows the load.

    Raises:
        InvalidInput: Ray refuses it, or no engine is to be there at times.
    """
    from ray.serve.config import AutoscalingConfig

    try:
        made = AutoscalingConfig(**given)
    except (ValueError, TypeError) as error:
        said = " ".join(str(error).split())
        raise InvalidInput(f"autoscaling_config is not as Ray wants it: {said}") from None
    if made.min_replicas < 1:
        raise InvalidInput(
            f"autoscaling_config has min_replicas {made.min_replicas}; must be at least 1: without an engine requests are refused"
        )
    return made


def application(
    settings: ServerSettings, *, strategy: str = "STRICT_PACK", scaling: Mapping[str, Any] | None = None
) -> Application:  # fmt: skip
    """Returns the application; checks the room if Ray is connected to a cluster.

    Args:
        settings: the server's settings.
        strategy: where the GPUs of one engine are, one of STRATEGIES.
        scaling: Ray's `autoscaling_config`, which then says how many replicas there are.

    Raises:
        InvalidInput: Ray is not installed, an argument makes no sense, or the cluster has no room.
    """
    if strategy not in STRATEGIES:
        raise InvalidInput(f"placement_group_strategy is {strategy!r}; must be one of {', '.join(STRATEGIES)}")
    ray, serve = needed()
    from rooftile.server.on_ray.engine import Engine
    from rooftile.server.on_ray.ingress import ENGINE, ingress

    ranks = ranks_of(settings.engine)
    most = settings.engine.get("max_num_seqs", SETTINGS["max_num_seqs"].default)
    least = largest = settings.replicas
    options: dict[str, Any] = {"num_replicas": settings.replicas}
    if scaling is not None:
        # an engine is full when it runs as many answers as it can; Ray's own measure is two
        asked = scaling_of({"target_ongoing_requests": most} | dict(scaling))
        least, largest = asked.min_replicas, asked.max_replicas
        options = {"autoscaling_config": asked}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    on_cpu = settings.engine.get("device") == "cpu" or (bool(nodes) and not any(node.get("GPU") for node in nodes))
    if nodes:
        check_room(least, ranks, nodes, on_cpu=on_cpu, strategy=strategy)
    bundle = {"CPU": 1} if on_cpu else {"CPU": 1, "GPU": 1}
    if ranks > 1:
        options |= {"placement_group_bundles": [bundle] * ranks, "placement_group_strategy": strategy}
    try:
        from ray.serve.config import RequestRouterConfig

        from rooftile.server.on_ray.router import PrefixRouter

        options["request_router_config"] = RequestRouterConfig(request_router_class=PrefixRouter)
    except ImportError:
        # this part of Ray is alpha; without it the less loaded of two replicas answers
        pass
    ongoing = most + settings.max_waiting + SPARE
    engine = serve.deployment(
        Engine, name=ENGINE, ray_actor_options={"num_cpus": 1, "num_gpus": bundle.get("GPU", 0)}, max_ongoing_requests=ongoing,
        max_queued_requests=ongoing, graceful_shutdown_timeout_s=settings.drain_s, health_check_period_s=2.0, **options,
    )  # fmt: skip
    # it takes no CPU that an engine could have: the room was counted for engines alone
    door = serve.deployment(
        serve.ingress(ingress(settings))(), name="Ingress", max_ongoing_requests=2 * ongoing * largest,
        graceful_shutdown_timeout_s=settings.drain_s, ray_actor_options={"num_cpus": 0},
    )  # fmt: skip
    own = {"model": settings.model, "json_log": settings.json_log} | settings.engine
    return door.bind(engine.bind(own, settings.stall_s, __version__))
