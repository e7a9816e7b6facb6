"""Replicas on a Ray cluster: `app` makes an application of Ray Serve from a checkpoint. Ray is the extra `rooftile[cluster]`.

application  the application, and whether the cluster has room for it
ingress      the deployment that answers HTTP: the server's routes, keys, limits and errors
engines      the engines as the ingress sees them
engine       the deployment that holds an engine
router       which replica of it answers a prompt
command      `rooftile serve --cluster ray`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app"]


def app(
    model: str, *, replicas: int = 2, tensor_parallel_size: int = 1, api_key_file: str | Path | None = None, **options: Any
) -> Application:  # fmt: skip
    """Returns an application of Ray Serve: HTTP in OpenAI's form in front of engines with a checkpoint's model.

    Args:
        model: a checkpoint's folder, which each machine of the cluster has under the same path, or a name on the Hub.
        replicas: how many engines there are.
        tensor_parallel_size: the GPUs of each engine, on one machine.
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

    options = {"model": model, "replicas": replicas, "tensor_parallel_size": tensor_parallel_size} | options
    return application(settings_of(options, api_key_file))
