"""Broken lines of attention on sequences that several ranks hold."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

AGREES = "tests/parallel/test_context_attention.py"
MUTATIONS = {
    "sequences, a chunk's first key": Mutation(
        "exact/restrict.py", "first = max(first // lcm(*chunks) * lcm(*chunks), 0)", "first = max(first, 0)",
        ("tests/unit/test_restrict.py",),
    ),
    "sequences, the diagonal of a part": Mutation(
        "exact/restrict.py", "ahead = high - 1 - last", "ahead = high - last", ("tests/unit/test_restrict.py",),
    ),
    "sequences, positions within documents": Mutation(
        "parallel/sharding.py", "return found - starts[torch.searchsorted(starts, found, right=True) - 1]", "return found",
        (AGREES, "-k", "dealt_out"),
    ),
    "sequences, a partial rounded to 16 bits": Mutation(
        "parallel/ring.py", "o.lerp_(part, _by_rows(weight))", "o.lerp_(part.bfloat16().to(o.dtype), _by_rows(weight))",
        (AGREES, "-k", "as_exact and ring"),
    ),
    "sequences, gradients of one hop": Mutation(
        "parallel/ring.py", "[x.add_(y) for x, y in zip(coming.wait(), own, strict=True)]", "coming.wait()",
        (AGREES, "-k", "as_exact and ring"),
    ),
    "sequences, gradients of another rank": Mutation(
        "parallel/exchange.py", "total[..., start:stop, :, :] += piece", "total[..., start:stop, :, :] += 0 * piece",
        (AGREES, "-k", "as_exact and gather"),
    ),
    "sequences, the last group of heads": Mutation(
        "parallel/gathered.py", "for n in range(groups)]", "for n in [0] * groups]",
        ("tests/parallel/test_plan.py", "-k", "groups_of_heads"),
    ),
    "sequences, bytes of gradients": Mutation(
        "parallel/traffic.py", "exchange.tokens_fetched * WIDE_BYTES", "exchange.tokens_fetched * s.itemsize / 2",
        ("tests/parallel/test_plan.py", "-k", "bytes_are"),
    ),
    "sequences, a draw's first query": Mutation(
        "parallel/ring.py", "Start(sequence, part.t_start - first,", "Start(sequence, 0,",
        (AGREES, "-k", "one_process and 2 and not exact"),
    ),
}  # fmt: skip
