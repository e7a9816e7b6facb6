"""How gpt-oss writes a call: a message to a function, from its recipient on; and where such a header begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rooftile.engine.chat.harmony.header import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    ENDS,
    FUNCTIONS,
    MESSAGE,
    START,
    split_at_marks,
)  # fmt: skip
from rooftile.engine.chat.tools.beginnings import Beginnings, Watch
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.tool import Tool

# the grammar begins here: thousands of tokens begin with the last character of a longer text, and each would be compared with it
RECIPIENT = "to="


class HarmonyForm(CallForm):
    """Writes a message to a function; its mark ends the answer, so there is one."""

    marks = (RECIPIENT,)
    in_headers = True
    repeats = False

    def before(self, rules: CallRules) -> str:
        """Returns the channel of a call."""
        return f'{rules.mark(CHANNEL)} "{COMMENTARY} "'

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns the recipient, the rest of the header, and the arguments."""
        channel = f'({rules.mark(CHANNEL)} ("{COMMENTARY}" | "{ANALYSIS}"))?'
        kind = f'(" "? {rules.mark(CONSTRAIN)} "json" | " json")?'
        rest = rules.rule(f"{channel} {kind} {rules.mark(MESSAGE)}")
        heads = [f"{written(RECIPIENT + FUNCTIONS + tool.name)} {rest} {rules.arguments(tool)}" for tool in tools]
        return " | ".join(map(rules.rule, heads))


class HeaderWatch(Watch):
    """Looks for the beginning of a call in headers alone.

    Args:
        beginnings: the texts that begin calls.
        turn: the text of the prompt's last turn (see `last_turn`).
    """

    def __init__(self, beginnings: Beginnings, turn: str) -> None:
        super().__init__(beginnings)
        self._in_header = True
        self.feed(START + turn)

    @property
    def free(self) -> int:
        """The number of next tokens that complete no beginning: a text has to end first."""
        return super().free if self._in_header else 3

    def feed(self, text: str) -> str | None:
        """Takes the next text; returns the text from the beginning of a call on, once there is one that is complete."""
        pieces = split_at_marks(text)
        for place, piece in enumerate(pieces):
            if piece == START or piece in ENDS:
                self._in_header = True
                self.reset()
            elif piece == MESSAGE:
                self._in_header = False
            elif self._in_header and (found := super().feed(piece)) is not None:
                return found + "".join(pieces[place + 1 :])
        return None

    def completions(self) -> Iterator[tuple[str, str]]:
        """Yields the beginnings that the next text may complete, each as a whole, and what of it is due."""
        return super().completions() if self._in_header else iter(())
