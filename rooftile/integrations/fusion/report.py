"""`Fused`: the answer of `fuse`, which prints as a table."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from rooftile import shown


class Fused(NamedTuple):
    """Lists what `fuse` replaced, and what it did not; `print` shows a line for each kind and each reason."""

    replaced: dict[str, int]  # modules by what runs in them now
    kept: dict[str, str]  # the reason by the name of the module

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
        return "\n".join(lines)
