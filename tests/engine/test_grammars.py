"""Grammars in GBNF and in Lark's form, and structural tags: texts that they allow and texts that they do not."""

from __future__ import annotations

import pytest

from rooftile.engine.sampling.gbnf import is_gbnf, lark_of
from rooftile.engine.sampling.grammar import Grammars
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.engine.folders import save

pytest.importorskip("llguidance", reason="llguidance is not installed")

SQL = """
# a comment with "quotes" and ::=
root ::= select
select ::= "SELECT " column (", " column)* " FROM "   # behind a rule
    table
column ::= "a" | "b-c" | quoted
table ::= [A-Z_] [a-zA-Z0-9_]*
quoted ::= "\\"" [^"\\\\\\n]{1,3} "\\""
"""


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    tokenizer = Tokenizer.from_folder(save("byte_level", tmp_path_factory.mktemp("tokenizer")))
    return Grammars(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_ids))


def allows(grammars: Grammars, structured: dict, text: str, *ids: int) -> bool:
    """Tells whether a grammar allows a text as a whole, which some token ids may follow."""
    tokenizer = grammars._tokenizer
    (end,) = grammars._ends
    matcher = grammars.compile(structured)
    for token in [*tokenizer.encode(text, False), *ids, end]:
        if matcher.over:
            return token == end
        if not matcher.mask[token // 32] >> token % 32 & 1:
            return False
        matcher.take(token)
    return True


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (SQL, ["SELECT a FROM T", 'SELECT a, b-c, "é]" FROM _x9', 'SELECT "a-b" FROM A'],
         ["SELECT a FROM t", "SELECT  FROM T", 'SELECT "abcd" FROM T', 'SELECT "\\" FROM T', "SELECT a"]),
        ('root ::= "a"{2} | "b"{2,} | "c"{,2} "." | ("d" | "e" "f"?)+', ["aa", "bbbb", "c.", ".", "ddef", "ee"],
         ["a", "b", "ccc.", "f"]),
        ('root ::= "x" | \nmy-rule ::= root', ["x", ""], ["y"]),
        ("root ::= [a\\-z] [\\x41-\\x43] [^a-c] [\\]^] .", ["-Bd]\n", "aA\n^é"], ["bBd]x", "-Da]x", "-Baax"]),
        ('root ::= "\\u00e9\\U0001F600\\t/" [/"]', ["é😀\t//", 'é😀\t/"'], ["e😀\t//"]),
        ('root ::= "(" root ")" | ""', ["", "(())"], ["(()"]),
        ('start: "a" other | /[0-9]+/\nother: "b" | "c"', ["ab", "42"], ["a", "4a"]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(grammars, grammar, yes, no) -> None:
    for text in yes:
        assert allows(grammars, {"grammar": grammar}, text), text
    for text in no:
        assert not allows(grammars, {"grammar": grammar}, text), text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("root ::= missing", "the rule missing is missing"), ('a ::= "b"', "the rule root is missing"),
        ('root ::= "a"\nroot ::= "b"', "the rule root stands twice"), ('root ::= ("a"', "a bracket is not closed"),
        ('root ::= "a")', "a bracket is closed that was not opened"), ("root ::= *", "* follows nothing"),
        ("root ::= " + "(" * 65, "nested deeper than 64"), ("root ::= [z-a]", "the range z-a is empty"),
        ("root ::= []", "[] has no character"), ('root ::= "\\q"', "\\q is no escape"), ('root ::= "\\ud800"', "is no character"),
        ('root ::= "\\x4"', "is no character"), ('root ::= "a"{}', "is no number of times"),
        ('root ::= "a', "is no part of GBNF"),
        ('root ::= (?="a")', "is no part of GBNF"), ('root ::= "a" ::= "b"', "::= stands in a rule"),
        ('"x" root ::= "a"', "a rule begins with its name"),
        ('root ::= "a"{9999999}', "is no number of times"), ('root ::= "a"**', "* follows nothing"),
    ],
)  # fmt: skip
def test_a_grammar_that_is_wrong_is_refused_in_a_sentence(grammar, why) -> None:
    assert is_gbnf(grammar) or grammar.startswith(("root", '"x"'))
    with pytest.raises(InvalidInput) as refused:
        lark_of(grammar)
    assert str(refused.value).startswith("the grammar cannot be used: ")
    assert why in str(refused.value)


def test_structural_tags(grammars) -> None:
    tokenizer = grammars._tokenizer
    think = tokenizer.added_id("<think>")
    tags = {
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}, {"begin": "<f=b>", "schema": True, "end": ""},
            {"begin": "<think>", "schema": {"const": [1]}, "end": "."},
        ],
        "triggers": ["<f=", "<think>"],
    }  # fmt: skip
    structured = {"structural_tag": tags}
    SamplingParams(structured=structured)
    for text in ("", "free text < f", 'one <f=a>17</f> and <f=b>{"a": 1} more', "<f=a>1</f><f=a>2</f>"):
        assert allows(grammars, structured, text), text
    for text in ("<f=c>", "<f=a>x</f>", "<f=a>1", "one <f=a>1</g>"):
        assert not allows(grammars, structured, text), text
    # a trigger that is one token of the model
    assert allows(grammars, structured, "hm ", think, *tokenizer.encode("[1].", False))
    assert not allows(grammars, structured, "hm ", think, *tokenizer.encode("[2].", False))
    assert not allows(grammars, structured, "hm ", think)
