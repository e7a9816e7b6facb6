"""Replicas on a Ray cluster: `app` makes an application of Ray Serve from a checkpoint. Ray is the extra `rooftile[cluster]`.

application  the application
nodes        what the cluster's nodes have: room, versions
ingress      the deployment that answers HTTP: the server's routes, keys, limits and errors
engines      the engines as the ingress sees them
engine       the deployment that holds an engine
ranks        the actors of an engine that has several ranks
router       which replica of it answers a prompt
command      `rooftile serve --cluster ray`
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app"]


def app(
    model: str, *, replicas: int | None = None, tensor_parallel_size: int = 1, placement_group_strategy: str = "STRICT_PACK",
    autoscaling_config: Mapping[str, Any] | None = None, api_key_file: str | Path | None = None, **options: Any,
) -> Application:  # fmt: skip
    """Returns an application of Ray Serve: HTTP in OpenAI's form in front of engines with a checkpoint's model.

    Args:
        model: a checkpoint's folder, which each machine of the cluster has under the same path, or a name on the Hub.
        replicas: how many engines there are; None for 2, or for what `autoscaling_config` says.
        tensor_parallel_size: the GPUs of each engine, which share the model.
        placement_group_strategy: where they are, in Ray's words: "STRICT_PACK" on one node, "PACK" on as few nodes as possible,
            "SPREAD" on as many as possible, or "STRICT_SPREAD" on a node each.
        autoscaling_config: Ray's own: engines start and end with the load, from `min_replicas` to `max_replicas`.
        api_key_file: a file of keys, as `rooftile serve` takes it; without one the server answers only requests whose Host header
            names this machine, unless `open` is True or `allowed_hosts` names others.
        options: other settings of the server or of `LLM`, by their names: `max_waiting=512`, `weights="fp8"`.

    Raises:
        InvalidInput: Ray is not installed, a setting makes no sense, or the cluster has no room.
        Unsupported: a setting names a feature that is missing here.

    Example:
        >>> serve.run(app("/models/Llama-3.2-1B", replicas=4), name="rooftile", route_prefix="/")  # doctest: +SKIP
    """
    from rooftile.server.on_ray.application import application, settings_of

    if replicas is not None and autoscaling_config is not None:
        raise InvalidInput(f"replicas is {replicas}, and autoscaling_config says how many there are; leave one of them out")
    count = (2 if autoscaling_config is None else 1) if replicas is None else replicas
    options = {"model": model, "replicas": count, "tensor_parallel_size": tensor_parallel_size} | options
    return application(settings_of(options, api_key_file), strategy=placement_group_strategy, scaling=autoscaling_config)
