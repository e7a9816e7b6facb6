"""A server on a Ray cluster of this machine beside one without: the seconds to the first token of one request on idle servers.

As a program it is the cluster and the server on it: `python -m rooftile_lab.bench.server.on_ray FOLDER PORT OPTIONS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rooftile_lab.bench.models import MODELS
from rooftile_lab.bench.needed import needed
from rooftile_lab.bench.processes import ROOT, environment
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.server.bars import ROOM
from rooftile_lab.bench.server.client import Reading, get, read_all, stream_of
from rooftile_lab.bench.server.run import Run

READY_S = 300.0
# turns whose times are not taken: connections between Ray's processes are made in them
FIRST = 10
PROMPT, TOKENS = 256, 8


def on_ray(run: Run) -> Row:
    """Compares the seconds to the first token through Ray with the direct server's, a request to each in turn."""
    rng, vocabulary = random.Random(0), MODELS[run.options.model].vocab_size
    direct: list[float] = []
    through: list[float] = []
    with run.server(*ROOM) as server, served(run) as port:
        for turn in range(20 * run.options.runs + FIRST):
            prompt = [rng.randrange(vocabulary) for _ in range(PROMPT)]
            for each, taken in ((server.port, direct), (port, through)):
                (reading,) = asyncio.run(read_all(each, [stream_of(prompt, TOKENS)]))
                if turn >= FIRST:
                    taken.append(first_token_ms(reading))
    taken_all = {
        "ray_ttft_ms": through, "direct_ttft_ms": direct, "above_ms": [median(through) - median(direct)],
    }  # fmt: skip
    return run.bar("ray", taken_all, prompt_tokens=PROMPT)


def first_token_ms(reading: Reading) -> float:
    """Returns the milliseconds to the first event; raises RuntimeError if the request was not answered."""
    if reading.status != 200 or not reading.times:
        raise RuntimeError(f"a request was answered with {reading.status}: {reading.tail[-300:]!r}")
    return 1e3 * (reading.times[0] - reading.sent)


@contextmanager
def served(run: Run) -> Iterator[int]:
    """Yields the port of a server on a cluster of its own, with one engine that is ready."""
    needed("server --case ray", "ray")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = json.dumps(run.sizes | {"device": run.session.device.type, "max_waiting": 1000})
    # Ray writes a token into the home folder
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooftile_lab.bench.server.on_ray", str(run.folder), str(port), options], cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1", HOME=home, RAY_USAGE_STATS_ENABLED="0"), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until = time.monotonic() + READY_S
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server on Ray is not ready; its process has {process.poll()}")
                time.sleep(0.5)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def is_ready(port: int) -> bool:
    """Tells whether a server answers that its engine is ready."""
    try:
        return bool(json.loads(asyncio.run(get(port, "/health")))["replicas"] == ["ready"])
    except (OSError, ValueError, KeyError):
        return False


def main() -> None:
    """Makes a cluster of this machine, and serves on it until SIGTERM."""
    import ray

    from rooftile.server.on_ray.application import settings_of
    from rooftile.server.on_ray.command import run

    folder, port, options = sys.argv[1:]
    ray.init(num_cpus=max(2, os.cpu_count() or 2), include_dashboard=False, log_to_driver=False)
    code = run(settings_of({"model": folder, "port": int(port)} | json.loads(options)))
    ray.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
