"""The beginning of an engine on several ranks, on each of them.

On one machine rank 0 is the process that makes the LLM, and starts the others. Under torchrun each rank is a process of its own
that makes the LLM; those other than 0 serve rank 0 inside of it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rooftile.engine.engine import Engine
from rooftile.engine.ranks.following import follow
from rooftile.engine.ranks.group import RankGroup, dist
from rooftile.engine.ranks.leader import Leader
from rooftile.engine.ranks.leading_runner import LeadingRunner
from rooftile.engine.ranks.lines import Line
from rooftile.engine.ranks.machines import lines_to_all, store_of_ranks
from rooftile.engine.ranks.orders import SocketOrders
from rooftile.engine.ranks.processes import WorkerProcesses
from rooftile.engine.ranks.serving import serve_rank_0
from rooftile.engine.ranks.torchrun import Torchrun
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.start.blueprint import Blueprint, Model
from rooftile.engine.start.build import build_runner, engine_of
from rooftile.models.checkpoints.weights import reporting_progress

# how often it is looked whether all ranks have met
_PULSE_S = 0.01


def lead(blueprint: Blueprint) -> tuple[Engine, Leader]:
    """Builds an engine on all ranks.

    Args:
        blueprint: what this rank builds, of at least two.

    Returns:
        The engine, and what ends the other ranks.

    Raises:
        SystemExit: on a rank other than 0 of torchrun's, when rank 0 has ended.
    """
    config = blueprint.config
    given = Torchrun.of_environment()
    if given is not None and given.rank:
        serve_rank_0(given, lambda store, line: _work(blueprint, _joined(store, given, config, blueprint.device), line))
    leader = Leader(config.tensor_parallel_size)
    try:
        with leader.guarded():
            if given is not None:
                store = store_of_ranks()
                leader.lines = lines_to_all(store, given, leader.note_end)
                make = partial(_joined, store, given, config, blueprint.device)
            else:
                leader.processes = WorkerProcesses(leader.ranks, (blueprint.model, config), leader.fail)
                leader.lines = leader.processes.lines
                meeting = str(leader.processes.meeting)
                orders = SocketOrders(leader.processes.orders)
                make = partial(_met, meeting, 0, leader.ranks, config, blueprint.device, orders)
            leader.group = _unless_failed(leader, make)
            with reporting_progress(lambda share: leader.check()):
                built = build_runner(blueprint, leader.group, partial(LeadingRunner, leader))
            return engine_of(blueprint, built), leader
    except BaseException:
        leader.close()
        raise


def work(
    model: Model, config: EngineConfig, rank: int, ranks: int, meeting: str, orders: socket.socket, line: Line
) -> None:  # fmt: skip
    """Builds another rank's part in a process that rank 0 has started, and runs rank 0's orders."""
    blueprint = Blueprint.of(model, config, rank)
    _work(blueprint, _met(meeting, rank, ranks, config, blueprint.device, SocketOrders([orders])), line)


def _work(blueprint: Blueprint, group: RankGroup, line: Line) -> None:
    # gloo must be given back before the interpreter ends: the line's thread would keep it
    with line.reporting(group.progress):
        runner = build_runner(blueprint, group)[0]
        follow(runner, group)
    runner.forget_graphs()
    group.abort()


def _met(meeting: str, rank: int, ranks: int, config: EngineConfig, device: torch.device, orders: SocketOrders) -> RankGroup:
    """Returns the group of ranks that meet at a file of this machine."""
    store = dist.FileStore(meeting, ranks)
    return RankGroup(store, rank, ranks, device, loopback=True, ordered=config.deterministic, orders=orders)


def _joined(store: Any, given: Torchrun, config: EngineConfig, device: torch.device) -> RankGroup:
    """Returns the group of torchrun's ranks."""
    return RankGroup(store, given.rank, given.ranks, device, loopback=False, ordered=config.deterministic)


def _unless_failed(leader: Leader, make: Callable[[], RankGroup]) -> RankGroup:
    """Makes the group in a thread: a rank that has ended is waited for in vain."""
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=run, name="rooftile meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        leader.check()
        thread.join(_PULSE_S)
    if isinstance(made[0], Exception):
        raise made[0]
    group: RankGroup = made[0]
    return group
