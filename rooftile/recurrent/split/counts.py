"""FLOPs of a recurrence's passes in kernels, for a token and head: what several ranks take of one device's time.

A rank finds the state behind its tokens alone, then runs a whole pass from the state that is due; so does the backward. Ranks
with others on both sides also find the map of their tokens. All ranks do this at once: P of them take (1 + first / whole) / P.
"""

from __future__ import annotations

from typing import NamedTuple

# tokens of a chunk
CHUNK = 64


class Passes(NamedTuple):
    """FLOPs in forward and backward together.

    whole: of whole passes.
    alone: of states alone, and of their gradients.
    mapped: the same with the map of tokens.
    """

    whole: float
    alone: float
    mapped: float

    def share(self, ranks: int) -> float:
        """Returns the part of one device's FLOPs that the rank with most to do has, which is the time where FLOPs bound it."""
        first = 0.0 if ranks == 1 else self.alone if ranks == 2 else self.mapped
        return (1 + first / self.whole) / ranks


def ssd(P: int, N: int, heads_per_group: int = 1) -> Passes:
    """Counts Mamba-2's recurrence: the map is a number for each head.

    Example:
        >>> round(ssd(P=64, N=128, heads_per_group=64).share(2), 2)
        0.59
    """
    state, pairs, maps = 2 * P * N, 2 * CHUNK * P, 2 * CHUNK * N / heads_per_group
    # forward: sums of segments, states and outputs; backward: the same for states and their gradients, then dx, dB and dC
    whole = (3 * state + pairs + maps) + (7 * state + 2 * pairs + 3 * maps)
    return Passes(whole, 2 * state, 2 * state)


def selective_scan() -> Passes:
    """Counts Mamba-1's scan in walks over a channel's states, of which each is one exponential and two products a token."""
    # forward: states, outputs; backward: states, their gradients, and a walk there and back
    return Passes(2 + 4, 2, 2)


def gated_delta(Dk: int, Dv: int, heads_per_key: int = 1) -> Passes:
    """Counts the gated delta rule: its map is a second walk beside the first.

    Example:
        >>> round(gated_delta(Dk=128, Dv=128, heads_per_key=2).share(4), 2)
        0.39
    """
    state, key_pairs, value_pairs = 2 * Dk * Dv, 2 * CHUNK * Dk, 2 * CHUNK * Dv
    # products of queries and keys, and the inverse of a system, in three products of tf32
    ready = 2 * key_pairs / heads_per_key + 2 * CHUNK * CHUNK
    states, back = 2 * state + value_pairs, 3 * state + 2 * value_pairs
    of_map = 2 * 2 * Dk * Dk + key_pairs
    gradients = 3 * state + 2 * value_pairs + 5 * key_pairs
    whole = (ready + 3 * state + 2 * value_pairs) + (ready + states + back + gradients)
    alone = (ready + states) + (ready + back)
    return Passes(whole, alone, alone + of_map)


def linear(F: int, Dv: int, heads_per_key: int = 1) -> Passes:
    """Counts linear attention with F features: there is no map."""
    state, pairs, g = 2 * F * Dv, 2 * CHUNK * (F + Dv), heads_per_key
    # forward: sums of segments, outputs; backward: sums of segments twice, then queries, keys and values, each with its pairs
    whole = (state + g * (2 * state + pairs)) + (state + g * state + 3 * g * (2 * state + 1.5 * pairs))
    alone = state + g * state
    return Passes(whole, alone, alone)
