"""Compares a server with its engine alone, on one machine in one run: a row for each case.

throughput    output tokens per second of W1, all streaming, beside the engine's own driver
first-token   seconds to the first token of one request on an idle server, beside the engine
lag           the event loop's lag, and what running streams lose, while others send large bodies, long texts and hostile schemas
constrained   64 running answers, 8 of them with a grammar: the time between tokens of both kinds beside 64 without
start         seconds from the command to listening, and of --help
replicas      two replicas beside one, and their cached tokens beside two servers chosen at random: needs two GPUs
ray           a server on a Ray cluster of this machine, beside one without: seconds to the first token
overload      twice as many requests as the server can answer, for ten minutes

Weights are random. On a CPU the engine has one thread, in this process and in the server's: the server's other process needs the
second core.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rooftile.cost.session import Session
from rooftile_lab.bench.models import check_llama
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.server.bars import constrained, first_token, start, throughput
from rooftile_lab.bench.server.lag import lag
from rooftile_lab.bench.server.on_ray import on_ray
from rooftile_lab.bench.server.overload import overload
from rooftile_lab.bench.server.replicas import replicas
from rooftile_lab.bench.server.run import Run, ServerOptions
from rooftile_lab.bench.threads import one_thread

CASES: dict[str, Callable[[Run], Row]] = {
    "throughput": throughput, "first-token": first_token, "lag": lag, "constrained": constrained, "start": start,
    "replicas": replicas, "ray": on_ray, "overload": overload,
}  # fmt: skip
ASKED = ("replicas", "ray", "overload")
GPU = CPU = tuple(name for name in CASES if name not in ASKED)
QUICK = ("first-token", "start")


def measure(
    session: Session, names: Sequence[str], say: Progress, *, options: ServerOptions, folder: Path | None = None
) -> Iterator[Row]:
    """A row for each case.

    Args:
        session: the machine.
        names: the cases.
        say: is told what is measured.
        options: sizes and durations.
        folder: where the checkpoint is, or is kept; None makes one for this run.
    """
    check_llama("server", options.model)
    # tokenizers is needed only here
    from rooftile_lab.bench.server.checkpoint import make_checkpoint

    with tempfile.TemporaryDirectory() as made, one_thread(session.device):
        place = folder or Path(made) / options.model
        if not (place / "config.json").is_file():
            say("the checkpoint")
            make_checkpoint(place, options.model, session.device)
        run = Run(session, place, options)
        for name in names:
            say(name)
            yield CASES[name](run)
