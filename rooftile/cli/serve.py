"""`rooftile serve`: answers HTTP requests in OpenAI's form with a checkpoint's model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rooftile.cli.engine_flags import takes_engine_flags
from rooftile.engine.ranks.machines import telling_ranks
from rooftile.engine.ranks.place import Place
from rooftile.engine.settings.table import ranks_of
from rooftile.engine.start.checkpoint import is_hub_name
from rooftile.errors import InvalidInput
from rooftile.weights.files.folder import check_folder


@takes_engine_flags
def serve(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or its name on the Hub.")] = "",
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str, typer.Option("--served-model-name", help="The model's name for clients.")] = "",
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="A file of lines name:sha256.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help="A key; may be given several times. Who lists programs here sees it.")
    ] = None,
    new_key: Annotated[str, typer.Option("--new-key", help="Print a new key of this name and its line, and exit.")] = "",
    open: Annotated[bool, typer.Option("--open", help="Let everybody in who reaches the address, without a key.")] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="A Host header to answer; may be given several times.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origins", help="Origins whose pages may ask, as https://a.example; * for all."),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", help="Engines behind this server, each with a GPU of its own.")] = 1,
    cluster: Annotated[str, typer.Option("--cluster", help="ray: replicas on the machines of a Ray cluster.")] = "",
    max_waiting: Annotated[int, typer.Option("--max-waiting", help="Answers that may wait, per replica.")] = 256,
    max_waiting_tokens: Annotated[
        int, typer.Option("--max-waiting-tokens", help="Prompt tokens that may wait, per replica.")
    ] = 262_144,
    max_per_key: Annotated[int | None, typer.Option("--max-per-key", help="Prompts of one key that wait or run.")] = None,
    max_body: Annotated[int, typer.Option("--max-body", help="The most bytes of a request's body.")] = 4 * 2**20,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds that a request may take.")] = 600.0,
    drain: Annotated[float, typer.Option("--drain", help="Seconds for running requests after SIGTERM.")] = 30.0,
    stall: Annotated[float, typer.Option("--stall", help="Seconds after which a step is taken for dead.")] = 120.0,
    metrics_prefix: Annotated[str, typer.Option("--metrics-prefix", help="The first word of each metric.")] = "rooftile",
    adapter_folder: Annotated[
        Path | None, typer.Option("--adapter-folder", help="A folder below which clients with a key may load adapters.")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write the log as JSON lines.")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Serves a checkpoint's model over HTTP, in the form of OpenAI's API.

    Example: rooftile serve Llama-3.2-1B --port 8000
    """
    from rooftile.server.keys import new_key as make_key
    from rooftile.server.keys import read_keys

    if new_key:
        key, line = make_key(new_key)
        print(f"key   {key}\nline  {line}")
        return
    if cluster not in ("", "ray"):
        raise InvalidInput(f"--cluster is {cluster[:40]!r}; must be ray")
    if not model:
        raise InvalidInput("serve got no model; give a checkpoint's folder or name")
    ranks, place = ranks_of(settings), Place.found()
    if place is not None and place.rank and ranks > 1:
        from rooftile.engine import LLM

        # rank 0 answers HTTP; this rank serves it until it ends
        LLM(model, **settings)
    if not is_hub_name(model):
        with telling_ranks(ranks):
            check_folder(model)
    try:
        from rooftile.server.server_run import run
        from rooftile.server.settings import ServerSettings, origins_of
    except ImportError as error:
        raise InvalidInput(
            f"serving needs the package {error.name}; pip install fastapi uvicorn httptools msgspec prometheus-client"
        ) from None
    served = ServerSettings(
        model=model, host=host, port=port, served_model_name=served_model_name,
        keys=read_keys(api_key_file, os.environ.get("ROOFTILE_API_KEY"), api_key or ()), open=open,
        allowed_hosts=tuple(allowed_host or ()), allowed_origins=origins_of(allowed_origins or ()),
        replicas=replicas, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens, max_per_key=max_per_key,
        max_body=max_body, deadline_s=deadline, drain_s=drain, stall_s=stall, metrics_prefix=metrics_prefix, json_log=json,
        log_prompts=log_prompts, adapter_folder=adapter_folder, on_cluster=bool(cluster), engine=settings,
    )  # fmt: skip
    if cluster:
        from rooftile.server.on_ray.command import run as run_on_ray

        sys.exit(run_on_ray(served))
    with telling_ranks(ranks):
        sys.exit(run(served))
