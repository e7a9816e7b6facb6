"""`PrefixRouter`: the server's routing as a `RequestRouter` of Ray Serve, whose interface is alpha. Nothing else needs it."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rooftile.server.replicas.prefixes import Prefixes
from rooftile.server.routing import Known, choose

# blocks that are known of a replica: four million tokens in blocks of 16
BLOCKS = 1 << 18


class PrefixRouter(RequestRouter):
    """Sends a prompt where most of its blocks are, as `choose` says; calls without blocks go to the less loaded replica."""

    def initialize_state(self, **options: Any) -> None:
        """Begins to know nothing of any replica."""
        self._turn = 0
        self._prefixes: dict[ReplicaID, Prefixes] = {}
        self._loads: dict[ReplicaID, int] = {}
        self._sent: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replica that shall answer, and behind it the others."""
        if not candidate_replicas:
            return []
        blocks, size, _ = _facts_of(pending_request)
        known = [
            Known(self._loads.get(each.replica_id, 0), self._prefixes_of(each.replica_id).count(blocks) * size)
            for each in candidate_replicas
        ]
        chosen = choose(known, self._turn)
        self._turn += 1
        others = [each for place, each in enumerate(candidate_replicas) if place != chosen]
        return [[candidate_replicas[chosen]], *([others] if others else [])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Notes which replica a prompt was sent to."""
        blocks, _, load = _facts_of(pending_request)
        self._prefixes_of(replica_id).add(blocks)
        self._sent[pending_request.metadata.internal_request_id] = load
        self._loads[replica_id] = self._loads.get(replica_id, 0) + load

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Notes the end of a request."""
        load = self._sent.pop(internal_request_id, 0)
        if replica_id in self._loads:
            self._loads[replica_id] -= load

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets a replica: the one that takes its place has an empty cache, and another name."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.pop(replica_id, None)
        self._loads.pop(replica_id, None)

    def _prefixes_of(self, replica_id: ReplicaID) -> Prefixes:
        return self._prefixes.setdefault(replica_id, Prefixes(BLOCKS))


def _facts_of(request: PendingRequest | None) -> tuple[list[int], int, int]:
    """Returns the blocks of a call's prompt, the tokens of each, and what the call adds to its replica's load."""
    given = {} if request is None else request.kwargs
    return given.get("blocks", []), given.get("size", 0), given.get("load", 0)
