"""Sums over GPUs of one machine that write into each other's memory."""

from rooftile.engine.ranks.peers.sums import PeerSums

__all__ = ["PeerSums"]
