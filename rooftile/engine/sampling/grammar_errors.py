"""Says why a grammar cannot be used, in our words: llguidance's errors name its own types, options and places."""

from __future__ import annotations

import re

_NO_TEXT = "it allows no text here"
_TOO_COMPLEX = "it is too complex: make it smaller, or its repetitions fewer"
_LOOK_AROUND = "look-around, to which \\b belongs, is not supported: write it without"

# patterns of its errors, in the order in which they are tried, and what to say
_SAID: tuple[tuple[str, str], ...] = (
    (r"NoExtension(Bias)?\b.*", _NO_TEXT),
    (r"(Lexer|Parser)TooComplex\b.*", _TOO_COMPLEX),
    (r".*\blookarounds? not supported.*", _LOOK_AROUND),
    (r".*regex parse error: .*? \^+ error: look-around.*", _LOOK_AROUND),
    (r".*regex parse error: (?P<regex>.*?) \^+ error: (?P<why>.*)", r"the regular expression \g<regex> is wrong: \g<why>"),
    (r"Pointer '(?P<place>.*)' does not exist", r"$ref points at \g<place>, which is not in the schema"),
    (r"Resource '(?P<place>.*?)' is not present.*", r"$ref names \g<place>, and nothing is fetched: put it into $defs"),
    (r'Unimplemented keys: \["?(?P<names>.*?)"?\]', r"the schema has \g<names>, which is not supported"),
    (r"oneOf constraints are not supported.*", "oneOf is not supported where two of its schemas may fit: write anyOf"),
    (r"Expecting object schema.*", "the schema false allows nothing"),
    (r"Unsatisfiable schema: (?P<why>.*)", r"nothing fits the schema: \g<why>"),
    (r"'utf-8' codec can't encode.*", "it has half of a surrogate pair; must be whole characters"),
    (r"(MaxTokens\w*|NotStopped|InternalError|Cancelled|EndOfSentence)\b.*", "llguidance has stopped"),
)  # fmt: skip


def reason_of(error: str) -> str:
    """Returns an error of llguidance as the reason for a refusal.

    Example:
        >>> reason_of("NoExtensionBias <non-verbose/>")
        'it allows no text here'
    """
    # without its place, and without the lines that show it
    first = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", re.split(r"\n +\d+ \| ", error)[0])
    words = " ".join(first.replace("<non-verbose/>", "").split())
    for pattern, said in _SAID:
        found = re.fullmatch(pattern, words)
        if found is not None:
            return found.expand(said).replace('", "', ", ")[:200] if "\\g<" in said else said
    return words[:200]
