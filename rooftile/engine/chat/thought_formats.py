"""How models mark their thoughts, and which of them a chat template belongs to.

A block of thoughts has a text before it and a text behind it. Some templates write the first into the prompt, so that an answer
begins inside of a thought; some models write it themselves; and an empty block in the prompt keeps a model from thinking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from rooftile.engine.chat.harmony.header import ANALYSIS, CALL, CHANNEL, END, FINAL, MESSAGE, RETURN, START
from rooftile.engine.text.harmony_messages import SIGN
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    from rooftile.engine.text.tokenizer import Tokenizer

Stage = Literal["before", "inside", "after"]
"""Whether a text ends before its thought, of which there may be none, inside of it, or after it."""


class ThoughtFormat(NamedTuple):
    """The marks around thoughts.

    Args:
        name: the name for --reasoning-parser.
        begins: the marks of which one may begin a thought.
        ends: the marks that end it; the first one is in `close`.
        close: what closes a thought that has become too long: a mark that ends, with the spaces that templates write.
        sign: a text that is in the chat templates of models with this format.
        others: names of vLLM's parsers for it.
        stops: tokens that end an answer, beside those that the checkpoint's files name.
    """

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    close: str
    sign: str
    others: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return self.begins + self.ends


# its messages are read by a reader of their own, which knows these marks, too
HARMONY = ThoughtFormat(
    "harmony", (f"{CHANNEL}{ANALYSIS}{MESSAGE}",), (END,), f"{END}{START}assistant{CHANNEL}{FINAL}{MESSAGE}", SIGN,
    ("openai_gptoss", "gptoss"), (CALL, RETURN),
)  # fmt: skip
# in the order in which templates are looked at: the last sign is the most general one
FORMATS = (
    HARMONY,
    ThoughtFormat("mistral", ("[THINK]",), ("[/THINK]",), "[/THINK]", "[/THINK]"),
    ThoughtFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), "</seed:think>", "</seed:think>"),
    ThoughtFormat("cohere", ("<|START_THINKING|>",), ("<|END_THINKING|>",), "<|END_THINKING|>", "<|END_THINKING|>"),
    ThoughtFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",), "\n</mm:think>\n\n", "</mm:think>"),
    ThoughtFormat("gemma4", ("<|channel>thought\n",), ("<channel|>",), "\n<channel|>", "<|channel>thought"),
    ThoughtFormat(
        "granite", ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:"),
        "\n\nHere is my response:", "Here is my thought process:",
    ),
    ThoughtFormat(
        "apriel", ("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), "\n[BEGIN FINAL RESPONSE]\n",
        "[BEGIN FINAL RESPONSE]",
    ),
    ThoughtFormat(
        "think", ("<think>",), ("</think>",), "\n</think>\n\n", "</think>",
        (
            "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "kimi_k2", "minimax_m2", "nemotron_v3",
            "olmo3", "poolside_v1", "qwen3", "smollm3", "step3", "step3p5",
        ),
    ),
)  # fmt: skip
NAMES = {name: each for each in FORMATS for name in (each.name, *each.others)}
# words that name no format
AUTO, NONE = "auto", "none"


def check_parser(setting: str, name: object) -> None:
    """Raises InvalidInput for a name that is none of a format's, nor auto or none."""
    if not isinstance(name, str) or name not in (AUTO, NONE, *NAMES):
        known = ", ".join(each.name for each in FORMATS)
        raise InvalidInput(f"{setting} is {str(name)[:80]!r}; must be auto, none, or a format of thoughts: {known}")


def choose_format(template: str | None, name: str = AUTO) -> ThoughtFormat | None:
    """Returns the format of a model's thoughts, by its name or by the text of a chat template; None if it marks none.

    Raises:
        InvalidInput: there is no such name.

    Example:
        >>> choose_format("... {{ '<think>' + thought + '</think>' }} ...").name
        'think'
    """
    check_parser("reasoning_parser", name)
    if name == AUTO:
        return next((each for each in FORMATS if template is not None and each.sign in template), None)
    return NAMES.get(name)


def stage_of(tokenizer: Tokenizer, ids: Sequence[int], form: ThoughtFormat) -> Stage:
    """Returns whether a prompt ends before the answer's thought, inside of it, or after it.

    Only the last turn counts, the tokens behind the last added one that is no mark: what users write stands in others. Where a
    tokenizer has no such tokens, only a mark at the prompt's very end counts.

    Args:
        tokenizer: the model's tokenizer.
        ids: the prompt's tokens.
        form: the model's marks.
    """
    start = len(ids)
    while start and not _ends_a_turn(tokenizer, ids[start - 1], form):
        start -= 1
    text = tokenizer.decode(ids[start:] if start else ids[-TAIL:], skip_special=False)
    if start == 0:
        text = next((mark for mark in form.marks if text.rstrip().endswith(mark.rstrip())), "")
    begun, ended = (max(text.rfind(mark.rstrip()) for mark in marks) for marks in (form.begins, form.ends))
    return "before" if begun == ended else "inside" if begun > ended else "after"


# tokens that hold any mark and the spaces behind it
TAIL = 64


def _ends_a_turn(tokenizer: Tokenizer, id: int, form: ThoughtFormat) -> bool:
    return tokenizer.is_added(id) and not any(tokenizer.token(id).strip() in mark for mark in form.marks)


def stops_of(tokenizer: Tokenizer | None, form: ThoughtFormat | None) -> tuple[int, ...]:
    """Returns the tokens that end an answer in a format."""
    if tokenizer is None or form is None:
        return ()
    return tuple(id for token in form.stops if (id := tokenizer.id_of(token)) is not None)
