"""`ThoughtReader`: splits the thoughts off an answer, and hands the rest on to the reader of calls.

    before --a mark that begins--> inside --a mark that ends--> after
    before --any other text--> after

Only the first text of an answer may begin a thought. Text that may still become a mark is held back, and so are spaces, which are
left out on both sides of the marks: templates write their own there. So the parts of a text are the same however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.parts import Part, Reader, Thought
from rooftile.engine.chat.thought_formats import Stage, ThoughtFormat

SPACES = " \t\r\n"


class ThoughtReader:
    """Reads the thoughts of one answer.

    Args:
        form: the model's marks.
        stage: where the answer begins (see `stage_of`).
        rest: reads what is no thought.
    """

    def __init__(self, form: ThoughtFormat, stage: Stage, rest: Reader) -> None:
        self.begin = self.end = 0
        """The thought's place in the text, in characters: spaces beside it are counted, and marks are not."""
        self.stage = stage
        """The place that the reader has reached: before the thought, inside of it, or after it."""
        self._form = form
        self._rest = rest
        self.held = ""
        """Text that is read, and held back."""
        # characters before it
        self._passed = 0
        # whether the thought has no text yet, and whether spaces are left out behind it
        self._fresh, self._trims = True, False

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The places of thoughts in the text: one."""
        return ((self.begin, self.end),)

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that the next text completes."""
        if self.stage == "after" and not self._trims:
            return self._rest.feed(text)
        self.held += text
        parts: list[Part] = []
        while (found := self._step()) is not None:
            parts += found
        return parts

    def finish(self) -> list[Part]:
        """Returns the last parts; the text ends here."""
        held, self.held = self.held, ""
        parts: list[Part] = []
        if self.stage == "inside":
            self.end = self._passed + len(held)
            # a thought that is cut off ends without its last spaces, like others
            parts = [Thought(text)] if (text := self._trimmed(held)) else []
        elif held and not self._trims:
            parts = self._rest.feed(held)
        return parts + self._rest.finish()

    def _step(self) -> list[Part] | None:
        """Takes what can be taken from the text that is held; returns None if more text is due."""
        if self.stage == "before":
            return self._look_for_beginning()
        if self.stage == "inside":
            return self._look_for_end()
        text = self.held.lstrip(SPACES)
        self._take(len(self.held) - len(text))
        if not text:
            return None
        self._trims = False
        self._take(len(text))
        return self._rest.feed(text)

    def _look_for_beginning(self) -> list[Part] | None:
        if self._takes_beginning():
            self.stage = "inside"
            return []
        if self._may_begin():
            return None
        self.stage = "after"
        held, self.held = self.held, ""
        return self._rest.feed(held)

    def _look_for_end(self) -> list[Part] | None:
        if self._fresh and self._takes_beginning():
            return []
        if self._fresh and self._may_begin():
            return None
        ends = [(at, -len(mark)) for mark in self._form.ends if (at := self.held.find(mark)) >= 0]
        if ends:
            at, size = min(ends)
            text, self.end = self._trimmed(self.held[:at]), self._passed + at
            self._take(at - size)
            self.stage, self._trims = "after", True
            return [Thought(text)] if text else []
        sure = len(self.held) - max(begun(self.held, mark) for mark in self._form.ends)
        text = self.held[:sure].rstrip(SPACES)
        if not text.strip(SPACES):
            return None
        self._take(len(text))
        self.end = self._passed
        text, self._fresh = self._trimmed(text), False
        # the reader holds the rest until more text comes
        return [Thought(text)]

    def _takes_beginning(self) -> bool:
        """Takes a mark that begins a thought, which models also write where the prompt has it; returns whether it is there."""
        text = self.held.lstrip(SPACES)
        mark = next((mark for mark in self._form.begins if text.startswith(mark)), None)
        if mark is not None:
            self._take(len(self.held) - len(text) + len(mark))
            self.begin = self.end = self._passed
        return mark is not None

    def _may_begin(self) -> bool:
        """Tells whether the text so far may become a mark that begins a thought."""
        text = self.held.lstrip(SPACES)
        return any(mark.startswith(text) for mark in self._form.begins)

    def _trimmed(self, text: str) -> str:
        return text.strip(SPACES) if self._fresh else text.rstrip(SPACES)

    def _take(self, count: int) -> None:
        self._passed += count
        self.held = self.held[count:]


def begun(text: str, mark: str) -> int:
    """Returns how many characters at a text's end may become a mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
