"""`ServerSettings`: the settings of `rooftile serve`, checked when they are made."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rooftile.engine.adapters.names import adapters_of
from rooftile.engine.settings.table import check_settings
from rooftile.engine.start.replica import VISIBLE
from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.keys import Keys
from rooftile.server.replicas.devices import environments


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of a server.

    Args:
        model: a checkpoint's folder, or its name on the Hugging Face Hub.
        host, port: the address; port 0 takes a free one.
        served_model_name: the model's name for clients; "" takes the last part of `model`.
        keys: the keys that open the server; without keys every client may come in.
        open: whether a server without keys may listen on another host than loopback.
        allowed_hosts: Host headers that are answered, with loopback's.
        allowed_origins: origins whose pages may ask and read answers, as "https://a.example"; "*" for all.
        replicas: how many engines answer, each with GPUs of its own.
        max_waiting, max_waiting_tokens: how many answers and prompt tokens may wait for each engine.
        max_per_key: how many requests of one key may wait or run; None for any number.
        max_body: the most bytes of a body.
        deadline_s, drain_s, stall_s: seconds for one request, for running requests at the end, and for one step.
        metrics_prefix: the first word of each metric's name.
        json_log: whether the log is JSON lines.
        log_prompts: whether the log has prompts.
        adapter_folder: the folder below which clients may name adapters to load; None if they may not.
        on_cluster: whether a cluster deals out GPUs, and this machine's variables say nothing of them.
        engine: keywords of `LLM`.

    Raises:
        InvalidInput: a value makes no sense.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    keys: Keys = field(default_factory=lambda: Keys({}), repr=False)
    open: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    replicas: int = 1
    max_waiting: int = 256
    max_waiting_tokens: int = 262_144
    max_per_key: int | None = None
    max_body: int = limits.BODY_BYTES
    deadline_s: float = 600.0
    drain_s: float = 30.0
    stall_s: float = 120.0
    metrics_prefix: str = "rooftile"
    json_log: bool = False
    log_prompts: bool = False
    adapter_folder: Path | None = None
    on_cluster: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self.engine)
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s*,]+", origin):
                raise InvalidInput(f"--allowed-origins has {origin[:80]!r}; must be *, or origins such as https://a.example")
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", Path(self.model.rstrip("/")).name or self.model)
        if len(self.served_model_name) > limits.NAME_CHARACTERS:
            raise InvalidInput(f"--served-model-name has more than {limits.NAME_CHARACTERS} characters; give a shorter one")
        if self.served_model_name in adapters_of(self.engine.get("adapters")):
            raise InvalidInput(f"--adapter has {self.served_model_name!r}, which is the model's name; give it another")
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            raise InvalidInput(f"--adapter-folder is {str(self.adapter_folder)!r}, which is no folder; make it first")
        if self.adapter_folder is not None and not self.keys:
            raise InvalidInput("--adapter-folder is given and no key; clients load adapters with a key: give --api-key-file")
        for name in ("replicas", "max_waiting", "max_waiting_tokens", "max_per_key", "max_body"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"--{name.replace('_', '-')} is {value}; must be at least 1")
        for name in ("deadline_s", "drain_s", "stall_s"):
            value = getattr(self, name)
            if not 0 <= value < 1e7 or (value == 0 and name != "drain_s"):
                least = "of at least 0" if name == "drain_s" else "above 0"
                raise InvalidInput(f"--{name.removesuffix('_s')} is {value:g}; must be a number of seconds {least}")
        if self.replicas > limits.REPLICAS:
            raise InvalidInput(f"--replicas is {self.replicas:,}; may be at most {limits.REPLICAS}")
        if not self.on_cluster:
            environments(self.replicas, self.engine, os.environ.get(VISIBLE))
        if not 0 <= self.port < 2**16:
            raise InvalidInput(f"--port is {self.port}; must be from 0 to 65535")
        if not re.fullmatch(r"[a-zA-Z_]\w*", self.metrics_prefix):
            raise InvalidInput(f"--metrics-prefix is {self.metrics_prefix!r}; must be a word of letters, digits and underscores")
        if not self.on_loopback and not self.keys and not self.open:
            raise InvalidInput(f"host {self.host} is open to others; give --api-key-file, or --open")

    @property
    def on_loopback(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        return is_loopback(self.host)


def origins_of(given: Sequence[str]) -> tuple[str, ...]:
    """Returns the origins of --allowed-origins: each a word, words with commas, or a list in JSON as vLLM's command takes it.

    Raises:
        InvalidInput: it begins like JSON, and is no list of texts.
    """
    found: list[str] = []
    for each in given:
        if not each.lstrip().startswith("["):
            found += [word.strip() for word in each.split(",") if word.strip()]
            continue
        try:
            listed = json.loads(each)
        except ValueError:
            listed = [None]
        if not all(isinstance(word, str) for word in listed):
            raise InvalidInput(f"--allowed-origins is {each[:80]!r}; must be a list of texts in JSON")
        found += listed
    # a browser sends an origin in small letters, and without a slash at its end
    return tuple(word.lower().removesuffix("/") for word in found)


# asked for every request, nearly always about the same few names
@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Tells whether a host's name or address reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
