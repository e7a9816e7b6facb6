"""Tile pictures of what each approximate method sees: by the text's order, and as a method arranges its tokens for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile import approximate as ap
from rooftile.approximate.native_sparse import definition as native_sparse
from rooftile.approximate.reformer import definition as reformer
from rooftile.approximate.sparse_transformer import definition as sparse_transformer
from rooftile_lab.bench.methods.way import Sizes, drawn
from rooftile_lab.report.tiles import Visit

DIM = 32
# the settings of the pictures, small, as their texts are
STRIDE, OWN, CHUNK, CLUSTERS, WINDOW, COUNT, PAGE = 16, 64, 64, 8, 64, 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The tiles that hold a pair which one head sees.

    Attributes:
        name: of the method, and of the order of its tokens.
        note: a sentence about it.
        N: tokens.
        block: queries and keys of a tile.
        visits: the tiles; one is masked if some of its pairs are not seen.
        pairs: how many are seen.
    """

    name: str
    note: str
    N: int
    block: int
    visits: tuple[Visit, ...]
    pairs: int

    @property
    def computed(self) -> float:
        """The share of all tiles that must be computed."""
        return len(self.visits) / (self.N // self.block) ** 2

    @property
    def filled(self) -> float:
        """The share of the computed tiles' pairs that are seen."""
        return self.pairs / (len(self.visits) * self.block**2) if self.visits else 0.0

    def json(self) -> dict[str, object]:
        """Returns the counts, without the list of tiles."""
        return {"name": self.name, "N": self.N, "block": self.block, "tiles": len(self.visits), "pairs": self.pairs}


def sight(name: str, note: str, seen: Tensor, block: int) -> Sight:
    """The tiles of a table of pairs (N, N), queries down."""
    n = seen.shape[0] // block
    counts = seen.view(n, block, n, block).sum((1, 3))
    visits = tuple(
        Visit(t * block, (t + 1) * block, s * block, (s + 1) * block, int(counts[t, s]) < block**2)
        for t, s in counts.nonzero().tolist()
    )
    return Sight(name=name, note=note, N=seen.shape[0], block=block, visits=visits, pairs=int(seen.sum()))


def sights(N: int, block: int = 16) -> list[Sight]:
    """The pictures for one head over N Gaussian tokens, N a multiple of 64."""
    q, k, _ = drawn(Sizes(1, N, 1, 1, DIM), torch.device("cpu"), torch.float32)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    everything = torch.ones(N, N, dtype=torch.bool)
    found = [
        sight("linear, performer", "All earlier tokens, through a state of fixed size", j <= i, block),
        sight("linformer", "All tokens, through a few rows that are sums", everything, block),
    ]
    return found + _by_place(N, block) + _by_content(q, k, N, block) + [_loki(q, k, N, block), _native_sparse(q, k, N, block)]


def _by_place(N: int, block: int) -> list[Sight]:
    strided = sparse_transformer.sees(N, N, 1, "strided", STRIDE, STRIDE, 8, "union")[0]
    fixed = sparse_transformer.sees(N, N, 1, "fixed", OWN, OWN, 8, "union")[0]
    # columns: the tokens of one place mod the stride lie side by side
    order = torch.arange(N).view(-1, STRIDE).T.flatten()
    far = sparse_transformer.sees(N, N, 1, "strided", STRIDE, STRIDE, 8, "second")[0]
    return [
        sight("strided", f"A window of {STRIDE}, and every {STRIDE}th token: a live key in every tile", strided, block),
        sight(
            "strided, by column", f"Every {STRIDE}th token, side by side. The window is another call", far[order][:, order], block
        ),
        sight("fixed", f"The own block of {OWN}, and the last 8 tokens of each earlier one", fixed, block),
    ]


def _by_content(q: Tensor, k: Tensor, N: int, block: int) -> list[Sight]:
    hashes = ap.lsh(q, 1, 2 * N // CHUNK)
    chunks = reformer.sees(hashes, CHUNK, True, False)[0, 0, 0]
    sort = hashes[0, :, 0, 0].sort(stable=True).indices
    centroids = torch.randn(1, CLUSTERS, DIM, generator=torch.Generator().manual_seed(0))
    _, members = ap.routing(q, q, q, centroids, strict=True)
    assert isinstance(members, Tensor)
    cluster = members[0, :, 0]
    i, j = torch.arange(N)[:, None], torch.arange(N)
    routed = (cluster[:, None] == cluster) & (j <= i)
    by_cluster = cluster.sort(stable=True).indices
    return [
        sight("reformer", f"Chunks of {CHUNK} tokens that hash alike, in one round", chunks, block),
        sight("reformer, sorted", "The same pairs, sorted by hash", chunks[sort][:, sort], block),
        sight("routing", f"The earlier tokens of the own of {CLUSTERS} clusters", routed, block),
        sight("routing, sorted", "The same pairs, sorted by cluster", routed[by_cluster][:, by_cluster], block),
    ]


def _loki(q: Tensor, k: Tensor, N: int, block: int) -> Sight:
    """One step of decoding per tile of queries, drawn as high as a tile."""
    loki = ap.Loki.fit(k)
    seen = torch.zeros(N, N, dtype=torch.bool)
    for t in range(block, N + 1, block):
        pages = loki.choose(q[:, t - 1 : t], k[:, :t], page=PAGE, unit="page")[0, 0].tolist()
        for page in pages:
            seen[t - block : t, page * PAGE : (page + 1) * PAGE] = True
    return sight("loki", f"A quarter of the keys, in pages of {PAGE}: one step of decoding per row of tiles", seen, block)


def _native_sparse(q: Tensor, k: Tensor, N: int, block: int) -> Sight:
    size = OWN // 2
    chosen = ap.choose_blocks(q, ap.compress(k), block_size=size, count=COUNT)
    seen = native_sparse.sees_selected(chosen, N, size, 1)[0, 0] | native_sparse.sees_near(N, N, WINDOW)
    note = f"{COUNT} chosen blocks of {size} and a window of {WINDOW}; compressed keys, one per 16 tokens, are not drawn"
    return sight("native sparse", note, seen, block)
