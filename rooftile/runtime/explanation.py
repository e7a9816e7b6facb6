"""`Explanation`: the answer of `explain`, a text that also holds the verdicts as values."""

from __future__ import annotations

from collections.abc import Iterable

from rooftile.drawing import notebook as shown


class Explanation(str):
    """Says which backend runs a call, and why the others do not. It is the text that `print` shows, with two attributes.

    Attributes:
        backend: the backend that runs it; None if all refuse.
        refusals: the reasons of each backend, in the order in which they are asked; () for one that could run.
    """

    backend: str | None
    refusals: dict[str, tuple[str, ...]]

    def __new__(cls, text: str, backend: str | None, refusals: Iterable[tuple[str, Iterable[str]]]) -> Explanation:
        found = super().__new__(cls, text)
        found.backend, found.refusals = backend, {name: tuple(reasons) for name, reasons in refusals}
        return found

    def __getnewargs__(self) -> tuple[str, str | None, list[tuple[str, tuple[str, ...]]]]:  # type: ignore[override]
        # copies and pickles are made by __new__
        return str(self), self.backend, list(self.refusals.items())

    def below(self, head: str) -> Explanation:
        """Returns it with a line above its text."""
        return Explanation(f"{head}\n{self}", self.backend, self.refusals.items())

    def __repr__(self) -> str:
        others = sum(bool(reasons) for reasons in self.refusals.values())
        runs = f"{self.backend} runs it" if self.backend else "no backend runs it"
        return f"Explanation({runs}, {shown.counted(others, 'backend refuses', 'backends refuse')}; print it for the reasons)"

    def _repr_html_(self) -> str:
        above = self.split(f"\n{next(iter(self.refusals), '')}")[0]
        rows = [(name, self._verdict(name)) for name in self.refusals]
        return shown.card(shown.preformatted(above), shown.table(("backend", ""), rows, words=(0, 1)))

    def _verdict(self, name: str) -> str:
        if name == self.backend:
            return "runs it"
        return "; ".join(self.refusals[name]) or f"could, but {self.backend} comes first"
