"""The nodes of a cluster: their addresses, their versions, and whether they have room for the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from rooftile import __version__
from rooftile.errors import InvalidInput

STRATEGIES = ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")
"""Ray's words for the nodes of one engine's GPUs: one node; few; many if possible; another for each."""


def node_address() -> str:
    """Returns the address of this process's node, at which other nodes reach it."""
    from ray.util import get_node_ip_address

    found: str = get_node_ip_address()
    return found


def torch_version() -> str:
    """Returns PyTorch's version in this process, which need not import it; "none" without PyTorch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def check_version(name: str, here: str, due: str, whose: str) -> None:
    """Checks a version in this process: what processes of an application send each other has no version of its own.

    Args:
        name: the package.
        here, due: its version in this process, and in another.
        whose: where the other process is.

    Raises:
        InvalidInput: they differ.
    """
    if here != due:
        raise InvalidInput(f"{name} is {here} on the node {node_address()}, and {due} {whose}; install the same on all nodes")


def check_rooftile(due: str) -> None:
    """Checks that this process has the Rooftile with which the application was made.

    Raises:
        InvalidInput: it has another one.
    """
    check_version("rooftile", __version__, due, "where the application was made")


def check_room(
    count: int, ranks: int, nodes: Sequence[Mapping[str, float]], *, on_cpu: bool, strategy: str = "STRICT_PACK"
) -> None:  # fmt: skip
    """Checks that a cluster has room for engines.

    Args:
        count: how many engines there are.
        ranks: GPUs of each.
        nodes: the resources of each node.
        on_cpu: whether they take CPUs, and no GPUs.
        strategy: one of STRATEGIES.

    Raises:
        InvalidInput: it has too little.
    """
    name = "CPU" if on_cpu else "GPU"
    there = [int(node.get(name, 0)) for node in nodes]
    many = name + "s" * (ranks > 1)
    asked = f"{count} replicas of {ranks} {many}"
    if sum(there) < count * ranks:
        raise InvalidInput(f"{asked} ask for {count * ranks}; the cluster has {sum(there)}")
    if strategy == "STRICT_PACK":
        fit, place = sum(each // ranks for each in there), "one node each"
    elif strategy == "STRICT_SPREAD":
        # a replica has one of a node then, so a node serves all replicas once at most
        fit, place = sum(min(each, count) for each in there) // ranks, f"{ranks} nodes each"
    else:
        return
    if fit < count:
        raise InvalidInput(f"{asked} on {place} ({strategy}) do not fit; the nodes have {', '.join(map(str, there))}")
