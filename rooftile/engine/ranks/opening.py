"""The beginning of an engine on several ranks, on each of them.

On one machine rank 0 is the process that makes the LLM, and starts the others. Where somebody else has started them (`Place`),
each rank is a process of its own that makes the LLM; those other than 0 serve rank 0 inside of it.
"""

from __future__ import annotations

import socket
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from rooftile.engine.engine import Engine
from rooftile.engine.ranks.following import follow
from rooftile.engine.ranks.group import LOOPBACK, RankGroup, dist
from rooftile.engine.ranks.late_group import LateGroup
from rooftile.engine.ranks.leader import Leader
from rooftile.engine.ranks.leading_runner import LeadingRunner
from rooftile.engine.ranks.lines import Line
from rooftile.engine.ranks.machines import lines_to_all
from rooftile.engine.ranks.orders import SocketOrders
from rooftile.engine.ranks.place import Place
from rooftile.engine.ranks.processes import WorkerProcesses
from rooftile.engine.ranks.serving import serve_rank_0
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.start.blueprint import Blueprint, Model
from rooftile.engine.start.build import build_runner, engine_of
from rooftile.engine.steps.runner import Runner
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
        if given.lined:
            serve_rank_0(given, lambda store, line: _serve(blueprint, _late(given, store, blueprint), line))
        _serve(blueprint, _late(given, given.meet(), blueprint), None)
        raise SystemExit(0)
    leader = Leader(config.ranks, told=given is None or given.watched or given.lined)
    try:
        with leader.guarded():
            if given is not None:
                store = given.meet()
                if given.lined:
                    leader.lines = lines_to_all(store, given, leader.note_end)
                make = partial(_joined, given, store, config, blueprint.device)
            else:
                leader.processes = WorkerProcesses(leader.ranks, (blueprint.model, config), leader.fail)
                leader.lines = leader.processes.lines
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


def work(
    model: Model, config: EngineConfig, rank: int, ranks: int, meeting: str, orders: socket.socket, line: Line
) -> None:  # fmt: skip
    """Builds another rank's part in a process that rank 0 has started, and runs rank 0's orders."""
    blueprint = Blueprint.of(model, config, rank)
    late = LateGroup(rank, ranks, partial(_met, meeting, rank, ranks, config, blueprint.device, SocketOrders([orders])))
    _work(blueprint, late, line)


def _serve(blueprint: Blueprint, late: LateGroup, line: Line | None) -> None:
    """Does a rank's part in a process that goes on after it."""
    _work(blueprint, late, line).forget_graphs()
    late.ready().abort()


def _work(blueprint: Blueprint, late: LateGroup, line: Line | None) -> Runner:
    """Builds another rank's part and runs rank 0's orders until it ends."""
    # gloo must be given back before the interpreter ends: the line's thread would keep it
    with nullcontext() if line is None else line.reporting(late.progress):
        runner = build_runner(blueprint, late)[0]
        follow(runner, late.ready())
    return runner


def _met(meeting: str, rank: int, ranks: int, config: EngineConfig, device: torch.device, orders: SocketOrders) -> RankGroup:
    """Returns the group of ranks that meet at a file of this machine."""
    store = dist.FileStore(meeting, ranks)
    return RankGroup(store, rank, ranks, device, address=LOOPBACK, ordered=config.deterministic, orders=orders)


def _late(given: Place, store: Any, blueprint: Blueprint) -> LateGroup:
    """Returns the group of ranks that are there already, as it is being made."""
    return LateGroup(given.rank, given.ranks, partial(_joined, given, store, blueprint.config, blueprint.device))


def _joined(given: Place, store: Any, config: EngineConfig, device: torch.device) -> RankGroup:
    """Returns the group of ranks that are there already."""
    return RankGroup(store, given.rank, given.ranks, device, address=given.address, ordered=config.deterministic)
