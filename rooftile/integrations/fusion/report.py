"""`Fused`: the answer of `fuse`, which prints as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import NamedTuple

from torch import nn

from rooftile.drawing import notebook as shown


class Fused(NamedTuple):
    """Lists what `fuse` replaced, and what it did not; `print` shows a line for each kind and each reason."""

    replaced: dict[str, int]  # modules by what runs in them now
    kept: dict[str, str]  # the reason by the name of the module
    others: str = ""  # what of the model it does not know, and the share of its parameters

    def __repr__(self) -> str:
        runs = ", ".join(f"{count:,} {title}" for title, count in self.replaced.items())
        return f"Fused({runs or 'nothing'}; {shown.counted(len(self.kept), 'module')} kept)"

    def _repr_html_(self) -> str:
        rows = [("fused", f"{count:,}  {title}") for title, count in self.replaced.items()]
        rows += [("not fused", f"{name}: {reason}") for name, reason in self.kept.items()]
        return shown.card(shown.facts(rows))

    def __str__(self) -> str:
        lines = [f"{'fused' if not n else '':<10}{count:,}  {title}" for n, (title, count) in enumerate(self.replaced.items())]
        names = defaultdict(list)
        for name, reason in self.kept.items():
            names[reason].append(name)
        for n, (reason, found) in enumerate(names.items()):
            shown = found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
            lines.append(f"{'not fused' if not n else '':<10}{shown}: {reason}")
        lines += [f"{'as before':<10}{self.others}"] * bool(self.others)
        return "\n".join(lines)


def others_of(model: nn.Module, changed: Container[int]) -> str:
    """Returns in one line the innermost modules that `fuse` leaves as they are, by their classes, and their share of parameters.

    changed: the ids of the modules that it changes.
    """
    total = sum(p.numel() for p in model.parameters())
    counts: dict[str, int] = defaultdict(int)
    held: dict[int, int] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and id(module) not in changed:
            counts[type(module).__name__] += 1
            held |= {id(p): p.numel() for p in own}
    if not counts:
        return ""
    named = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda one: -one[1]))
    return f"{named}: {sum(held.values()):,} of {total:,} parameters ({sum(held.values()) / total:.1%})"
