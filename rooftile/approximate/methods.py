"""The methods: the name of each, its knowledge of later tokens, its arguments, its cost, and its paper.

value-causal   no output depends on the value of a later token
strict         no output depends on anything of a later token
decodable      computed token by token, a text has the same rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftile.cost import approximate as cost

CLASSES = frozenset({"value-causal", "strict", "decodable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of approximate attention.

    Attributes:
        name: of its function or class in `rooftile.approximate`.
        causality: the classes that hold, by mode; a mode is the mask or the option that chooses it. Tests hold a method to them.
        takes: some of "groups", "packed", "gradients", "decode".
        cost: FLOPs and bytes from sizes, a function in `rooftile.cost.approximate`.
        title: of the paper.
        arxiv: its number.
    """

    name: str
    causality: dict[str, frozenset[str]]
    takes: frozenset[str]
    cost: Callable[..., cost.Cost]
    title: str
    arxiv: str


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="linear",
            causality={"CAUSAL": CLASSES, "FULL": frozenset()},
            takes=frozenset({"groups", "packed", "gradients", "decode"}),
            cost=cost.linear,
            title="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
            arxiv="2006.16236",
        ),
        Method(
            name="performer",
            causality={"CAUSAL": CLASSES, "FULL": frozenset()},
            takes=frozenset({"groups", "packed", "gradients", "decode"}),
            cost=cost.performer,
            title="Rethinking Attention with Performers",
            arxiv="2009.14794",
        ),
        Method(
            name="linformer",
            causality={"FULL": frozenset()},
            takes=frozenset({"groups", "gradients"}),
            cost=cost.linformer,
            title="Linformer: Self-Attention with Linear Complexity",
            arxiv="2006.04768",
        ),
        Method(
            name="sparse_transformer",
            causality={"strided": CLASSES, "fixed": CLASSES},
            takes=frozenset({"groups", "gradients", "decode"}),
            cost=cost.sparse_transformer,
            title="Generating Long Sequences with Sparse Transformers",
            arxiv="1904.10509",
        ),
        Method(
            name="reformer",
            # the sort of the hashes depends on later queries; `strict` with `buckets` given does not
            causality={"CAUSAL": frozenset({"value-causal"}), "strict": CLASSES, "FULL": frozenset()},
            takes=frozenset({"groups", "gradients"}),
            cost=cost.reformer,
            title="Reformer: The Efficient Transformer",
            arxiv="2001.04451",
        ),
        Method(
            name="routing",
            # a later token may push an earlier one out of a cluster; `strict` asks each token alone
            causality={"CAUSAL": frozenset({"value-causal"}), "strict": CLASSES, "FULL": frozenset()},
            takes=frozenset({"groups", "gradients"}),
            cost=cost.routing,
            title="Efficient Content-Based Sparse Attention with Routing Transformers",
            arxiv="2003.05997",
        ),
        Method(
            name="Loki",
            # for decoding alone: its rows belong to no prefill
            causality={"token": CLASSES - {"decodable"}, "page": CLASSES - {"decodable"}},
            takes=frozenset({"groups", "decode"}),
            cost=cost.loki,
            title="Loki: Low-rank Keys for Efficient Sparse Attention",
            arxiv="2406.02542",
        ),
        Method(
            name="native_sparse",
            causality={"CAUSAL": CLASSES},
            takes=frozenset({"groups", "packed", "gradients", "decode"}),
            cost=cost.native_sparse,
            title="Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
            arxiv="2502.11089",
        ),
    )
}
