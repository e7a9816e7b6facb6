"""The beginning of an engine on several ranks, on each of them.

On one machine rank 0 is the process that makes the LLM, and starts the others. Where somebody else has started them (`Place`),
each rank is a process of its own that makes the LLM; those other than 0 serve rank 0 inside of it.
"""

from __future__ import annotations

import socket
from functools import partial

import torch

from rooftile.engine.engine import Engine
from rooftile.engine.ranks.following import follow
from rooftile.engine.ranks.group import LOOPBACK, RankGroup, dist
from rooftile.engine.ranks.late_group import LateGroup
from rooftile.engine.ranks.leader import Leader
from rooftile.engine.ranks.leading_runner import LeadingRunner
from rooftile.engine.ranks.orders import SocketOrders
from rooftile.engine.ranks.place import Place
from rooftile.engine.ranks.processes import WorkerProcesses
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.start.blueprint import Blueprint, Model
from rooftile.engine.start.build import build_runner, engine_of
from rooftile.models.checkpoints.weights import reporting_progress


def lead(blueprint: Blueprint) -> tuple[Engine, Leader]:
    """Builds an engine on all ranks.

    Args:
        blueprint: what this rank builds, of at least two.

    Returns:
        The engine, and what ends the other ranks.

    Raises:
        SystemExit: on a rank other than 0 that somebody else has started, when rank 0 has ended.
    """
    config = blueprint.config
    given = Place.found()
    if given is not None and given.rank:
        late = LateGroup(given.rank, given.ranks, partial(_joined, given, config, blueprint.device))
        runner, group = build_runner(blueprint, late)[0], late.ready()
        follow(runner, group)
        runner.forget_graphs()
        group.abort()
        raise SystemExit(0)
    leader = Leader(config.ranks, told=given is None or given.watched)
    try:
        with leader.guarded():
            if given is not None:
                make = partial(_joined, given, config, blueprint.device)
            else:
                leader.processes = WorkerProcesses(leader.ranks, (blueprint.model, config), leader.fail)
                meeting = str(leader.processes.meeting)
                orders = SocketOrders(leader.processes.orders)
                make = partial(_met, meeting, 0, leader.ranks, config, blueprint.device, orders)

            def meet() -> RankGroup:
                leader.group = make()
                return leader.group

            late = LateGroup(0, leader.ranks, meet, leader.check)
            with reporting_progress(lambda share: leader.check()):
                built = build_runner(blueprint, late, partial(LeadingRunner, leader))
            return engine_of(blueprint, built), leader
    except BaseException:
        leader.close()
        raise


def work(model: Model, config: EngineConfig, rank: int, ranks: int, meeting: str, orders: socket.socket) -> None:
    """Builds another rank's part in a process that rank 0 has started, and runs rank 0's orders."""
    blueprint = Blueprint.of(model, config, rank)
    late = LateGroup(rank, ranks, partial(_met, meeting, rank, ranks, config, blueprint.device, SocketOrders([orders])))
    runner = build_runner(blueprint, late)[0]
    follow(runner, late.ready())


def _met(meeting: str, rank: int, ranks: int, config: EngineConfig, device: torch.device, orders: SocketOrders) -> RankGroup:
    """Returns the group of ranks that meet at a file of this machine."""
    store = dist.FileStore(meeting, ranks)
    return RankGroup(store, rank, ranks, device, address=LOOPBACK, ordered=config.deterministic, orders=orders)


def _joined(given: Place, config: EngineConfig, device: torch.device) -> RankGroup:
    """Returns the group of ranks that are there already."""
    return RankGroup(given.meet(), given.rank, given.ranks, device, address=given.address, ordered=config.deterministic)
