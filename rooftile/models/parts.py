"""`part_of`: the configuration of the part of a model that one of several ranks holds (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rooftile.errors import InvalidInput

# the configuration is made of what is imported here, so its type cannot be
ModelConfig = Any

# numbers of ranks that a refusal looks at, to say which would fit
_RANKS = range(1, 17)


def deals_experts(config: ModelConfig, ranks: int) -> bool:
    """Tells whether whole experts are dealt out by default: only where a slice of each does not fit.

    Slices of all chosen experts are equal work for all ranks. With whole experts the slowest rank has the most chosen ones, so
    that a step reads more bytes of weights, never fewer.
    """
    e = config.experts
    return e is not None and e.hidden % ranks > 0 and e.experts % ranks == 0


def part_of(config: ModelConfig, ranks: int, *, deal_experts: bool = False) -> ModelConfig:
    """Returns the configuration of one of `ranks` equal parts: fewer heads and narrower feed-forwards, and all else as it is.

    Experts are narrower, too; with `deal_experts` they are fewer.

    Where there are more ranks than heads of keys (or groups of a recurrence), several ranks hold the same one.

    Raises:
        InvalidInput: some number of the model cannot be dealt out to that many ranks.
    """
    misfit = next(_misfits(config, ranks, deal_experts), None)
    if misfit is not None:
        fitting = [str(n) for n in _RANKS if next(_misfits(config, n, deal_experts), None) is None]
        raise InvalidInput(f"{ranks} ranks are to share the model, which has {misfit}; give it to {' or '.join(fitting)}")
    sizes: dict[str, Any] = {
        "heads": config.heads // ranks,
        "kv_heads": _shared(config.kv_heads, ranks) if config.kv_heads else 0,
        "ffn": config.ffn // ranks,
    }
    if (e := config.experts) is not None:
        cut = {"ranks": ranks} if deal_experts else {"hidden": e.hidden // ranks}
        sizes["experts"] = replace(e, shared=e.shared // ranks, **cut)
    if (m := config.mamba) is not None:
        sizes["mamba"] = replace(m, width=m.width // ranks)
    if (m := config.mamba2) is not None:
        groups, norms = _shared(m.groups, ranks), _shared(m.norms, ranks)
        sizes["mamba2"] = replace(m, heads=m.heads // ranks, groups=groups, norm_groups=norms)
    if (d := config.delta) is not None:
        sizes["delta"] = replace(d, key_heads=_shared(d.key_heads, ranks), value_heads=d.value_heads // ranks)
    return replace(config, **sizes)


def _shared(count: int, ranks: int) -> int:
    """Returns how many of some heads or groups a rank holds, where a head may be on several ranks."""
    return max(count // ranks, 1)


def _misfits(config: ModelConfig, ranks: int, deal_experts: bool) -> Iterator[str]:
    """Yields the numbers that cannot be dealt out, in words."""
    divided: list[tuple[int, str]] = []
    repeated: list[tuple[int, str]] = []
    if config.attends:
        divided.append((config.heads, "heads of attention"))
        repeated.append((config.kv_heads, "heads of keys and values"))
    if "dense" in config.feed_forwards:
        divided.append((config.ffn, "columns in its feed-forwards"))
    if (e := config.experts) is not None:
        divided.append((e.experts, "experts") if deal_experts else (e.hidden, "columns in each expert"))
        divided.append((e.shared, "columns in the network that all tokens share"))
    if (m := config.mamba) is not None:
        divided.append((m.width, "channels of Mamba"))
    if (m := config.mamba2) is not None:
        divided.append((m.heads, "heads of Mamba-2"))
        repeated += [(m.groups, "groups of Mamba-2"), (m.norms, "groups of Mamba-2's norm")]
    if (d := config.delta) is not None:
        divided.append((d.value_heads, "heads of values in its delta nets"))
        # rows that are key head by key head cannot be cut within one
        (divided if d.by_key_head else repeated).append((d.key_heads, "heads of keys in its delta nets"))
    yield from (f"{count:,} {what}" for count, what in divided if count % ranks)
    yield from (f"{count:,} {what}" for count, what in repeated if count % ranks and ranks % count)
