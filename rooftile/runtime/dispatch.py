"""Chooses a backend for a call, and says why the others do not run it: for attention, for products and for 2:4 products.

The refusals of a backend are sentences: what came; what the backend has. They are pure, so choosing launches nothing, and nothing
here catches an exception. A backend that was named and refuses is never replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.explanation import Explanation

Call = TypeVar("Call")


@dataclass(frozen=True, slots=True)
class Dispatcher(Generic[Call]):
    """The choice among backends.

    Args:
        task: what a backend does, as a sentence about a refusal names it: "run this attention problem".
        order: returns the names of all backends, fastest first, for a call.
        refusals: returns the reasons of a named backend against a call.
        describe: returns a line that describes a call, or nothing.
    """

    task: str
    order: Callable[[Call], Sequence[str]]
    refusals: Callable[[str, Call], tuple[str, ...]]
    describe: Callable[[Call], str] = lambda call: ""

    def select(self, call: Call, name: str | None = None) -> str:
        """Returns the named backend, or the first that does not refuse.

        Raises:
            InvalidInput: no backend has that name.
            Unsupported: the named backend refuses, or every one does; the message lists the reasons.
        """
        names = self.order(call)
        if name is not None and name not in names:
            raise InvalidInput(f"backend is {name!r}; has {', '.join(names)}, or None for the fastest that runs")
        for candidate in names if name is None else (name,):
            if not self.refusals(candidate, call):
                return candidate
        raise Unsupported(self._refused(call, name))

    def verdicts(self, call: Call) -> dict[str, tuple[str, ...]]:
        """Returns the reasons of every backend, fastest first; none for a backend that runs the call."""
        return {name: self.refusals(name, call) for name in self.order(call)}

    def explain(self, call: Call) -> Explanation:
        """Says of every backend whether it runs the call."""
        verdicts = self.verdicts(call)
        chosen = next((name for name, reasons in verdicts.items() if not reasons), None)
        lines = [self.describe(call)]
        for name, reasons in verdicts.items():
            if name == chosen:
                lines.append(f"{name:8} runs it")
            else:
                lines += _listed(name, reasons) or [f"{name:8} could, but {chosen} comes first"]
        return Explanation("\n".join(lines), chosen, verdicts.items())

    def explain_choice(self, call: Call, runs: Callable[[str, Call], str] = lambda name, call: "runs") -> Explanation:
        """Says why the backends before the chosen one do not run the call, in one line each.

        runs: says of the chosen backend that it runs, and what could be faster.
        """
        lines, asked, chosen = [], [], None
        for name in self.order(call):
            reasons = self.refusals(name, call)
            lines.append(f"{name:<11} {'; '.join(reasons) or runs(name, call)}")
            asked.append((name, reasons))
            if not reasons:
                chosen = name
                break
        return Explanation("\n".join(lines), chosen, asked)

    def _refused(self, call: Call, name: str | None) -> str:
        verdicts = self.verdicts(call)
        if name is None:
            head, tail = f"no backend can {self.task}", _nearest(verdicts)
            listed = [line for each, reasons in verdicts.items() for line in _listed(each, reasons)]
        else:
            head, able = f"backend {name!r} cannot {self.task}", [each for each, reasons in verdicts.items() if not reasons]
            tail = f"instead  {', '.join(able)} can; backend=None picks the fastest" if able else _nearest(verdicts)
            listed = _listed(name, verdicts[name])
        described = self.describe(call)
        return "\n  ".join([head, *([described] if described else ()), *listed, tail])


def _listed(name: str, reasons: Iterable[str]) -> list[str]:
    return [f"{name if n == 0 else '':8} - {reason}" for n, reason in enumerate(reasons)]


def _nearest(verdicts: dict[str, tuple[str, ...]]) -> str:
    name = min(verdicts, key=lambda name: len(verdicts[name]))
    return f"nearest  {name}: {len(verdicts[name])} thing(s) to change"
