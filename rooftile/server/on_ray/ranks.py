"""The ranks of a replica that has several: rank 0 is the replica itself, and each other one an actor of Ray's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rooftile.engine.ranks.meeting import joined
from rooftile.engine.ranks.place import placed
from rooftile.engine.settings.table import ranks_of
from rooftile.errors import InvalidInput, Unsupported
from rooftile.server.observe.log import log
from rooftile.server.on_ray.nodes import check_rooftile, check_version, node_address, torch_version

# seconds in which rank 0's replica ends an actor, if something else than this actor has gone wrong
_ELSEWHERE_S = 1.0


class RankOrder(NamedTuple):
    """The order that each rank gets.

    Args:
        settings: the keywords of `LLM`, and `model`.
        address, port: where rank 0 listens.
        rooftile: the version with which the application was made.
        torch: the version in rank 0's replica.
    """

    settings: dict[str, Any]
    address: str
    port: int
    rooftile: str
    torch: str


class Rank:
    """The actor of a rank other than 0: its process holds a part of the model."""

    def node(self) -> str:
        """Returns the address of this actor's node."""
        return node_address()

    def run(self, order: RankOrder, rank: int) -> str:
        """Reads this rank's part, and runs rank 0's orders until it ends.

        Args:
            order: what rank 0's replica says to all ranks.
            rank: this one's number.

        Returns:
            A sentence about a version, the model or a setting, if this rank refuses it; else "".
        """
        # here and not above: the replica imports this module, and holds no model itself
        from rooftile.engine.llm import LLM
        from rooftile.engine.start.checkpoint import find_folder

        own = {name: value for name, value in order.settings.items() if name not in ("model", "json_log")}
        try:
            check_rooftile(order.rooftile)
            check_version("torch", torch_version(), order.torch, "on rank 0's node")
            model = find_folder(order.settings["model"], download=own.get("download", False))
            with placed(joined(order.address, order.port, rank, ranks_of(own), node_address())):
                LLM(model, **own)
        except SystemExit:
            pass
        except (InvalidInput, Unsupported) as error:
            return str(error)
        except Exception:
            # the end of another rank breaks this one's connections, and that one shall be named
            time.sleep(_ELSEWHERE_S)
            raise
        return ""


class RankActors:
    """The actors of ranks 1 to N - 1, each in a bundle of the replica's placement group.

    They end with the replica, whatever ends it, since its process owns them.

    Args:
        order: what each is told.
        ended: called with a sentence for clients, and with more for the log, when a rank ends before `close`.
    """

    def __init__(self, order: RankOrder, ended: Callable[[str, str], None]) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ranks, self._ended = ranks_of(order.settings), ended
        group = ray.util.get_current_placement_group()
        on_cpu = "GPU" not in group.bundle_specs[0]
        self._actors = []
        for rank in range(1, self._ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            made = ray.remote(Rank).options(num_cpus=1, num_gpus=0 if on_cpu else 1, scheduling_strategy=place, max_restarts=0)
            self._actors.append(made.remote())
        self._tasks = [asyncio.create_task(self._follow(order, rank, actor)) for rank, actor in enumerate(self._actors, 1)]

    def close(self) -> None:
        """Ends all actors."""
        import ray

        for task in self._tasks:
            task.cancel()
        for actor in self._actors:
            ray.kill(actor)

    async def _follow(self, order: RankOrder, rank: int, actor: Any) -> None:
        """Runs a rank, and says how it has ended."""
        from ray.exceptions import RayActorError, RayError

        name, where = f"rank {rank} of {self._ranks}", "a node"
        try:
            where = await actor.node.remote()
            log.info("%s is on the node %s", name, where)
            refused = await actor.run.remote(order, rank)
            self._ended(f"{name}: {refused}" if refused else f"{name} has ended (without an error)", "")
        except RayActorError as error:
            self._ended(f"{name} has ended (its actor on {where} has died)", f": {error}")
        except RayError as error:
            self._ended(f"{name} has ended (an exception on {where})", f": {error}")
