"""The ways by name, with the settings of the papers or of their usual code."""

from __future__ import annotations

from rooftile_lab.bench.methods.native_sparse import Choice, Compressed, NativeSparse, Near, Selected
from rooftile_lab.bench.methods.way import Sizes, Way
from rooftile_lab.bench.methods.ways import Linear, Linformer, Loki, Performer, Reformer, Routing, SparseTransformer

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Linear(name="linear"),
        Linear(name="linear-sums", normalise=False),
        Performer(name="performer"),
        Linformer(name="linformer"),
        SparseTransformer(name="strided", pattern="strided"),
        SparseTransformer(name="fixed", pattern="fixed"),
        Reformer(name="reformer"),
        Routing(name="routing"),
        Loki(name="loki"),
        NativeSparse(name="nsa"),
        NativeSparse(name="nsa-groups-of-4", heads=(32, 8)),
        Choice(name="nsa-choice"),
        Selected(name="nsa-selected"),
        Compressed(name="nsa-compressed"),
        Near(name="nsa-near"),
    )
}
# one way per method, in whole: those that a user chooses among
WHOLE = ("linear", "performer", "linformer", "strided", "fixed", "reformer", "routing", "loki", "nsa")
# head dim
DIMS = {"cuda": 128, "cpu": 64}


def sizes_of(way: Way, kind: str, N: int, B: int = 1, *, small: bool = False) -> Sizes:
    """The sizes of a way on a kind of device: its own heads on a "cuda", a quarter of them on a "cpu".

    small: one key head with its group, or two heads, for a comparison with the definition.
    """
    H, Hk = way.heads
    fewer = (Hk // 2 if Hk == H else Hk) if small else 4 if kind == "cpu" else 1
    return Sizes(B, N, H // fewer, Hk // fewer, DIMS[kind])
