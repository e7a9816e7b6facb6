"""The same calls in each syntax, its marks, and tokenizers in which the marks are tokens or are not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rooftile.engine.chat.harmony.header import MARKS
from rooftile.engine.chat.tools.choose import choose_syntax
from rooftile.engine.chat.tools.syntax import Syntax
from rooftile.engine.text import tokenizer

END = "<|end|>"
# beyond the tokens that the tokenizer has
SPARE = 5
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object", "required": ["city"], "additionalProperties": False,
                "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"type": "integer"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object", "required": ["a"], "additionalProperties": False,
                "properties": {
                    "a": {"type": "integer"}, "exact": {"type": "boolean"}, "unit": {"enum": ["m", "kg"]},
                    "more": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                },
            },
        },
    },
]  # fmt: skip
CITY = {"city": "Kiel", "days": 2}
SUM: dict[str, Any] = {"a": -7, "exact": True, "unit": "kg", "more": [1, 2]}


@dataclass(frozen=True)
class Case:
    """A syntax of calls, as a template of a model chooses it.

    Args:
        name: for --tool-call-parser.
        sign: what a template has.
        marks: added tokens of models that write it.
        one: a call of weather with CITY.
        two: calls of weather with CITY and of add with SUM; None where an answer has one.
        begins: how much of `one` begins a call, in characters.
    """

    name: str
    sign: str
    marks: tuple[str, ...]
    one: str
    two: str | None
    begins: int

    @property
    def syntax(self) -> Syntax:
        found = choose_syntax(self.sign, self.name)
        assert found is not None
        return found


def _object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def _xml(name: str, arguments: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _fenced(name: str, arguments: dict[str, Any]) -> str:
    call = f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"


def _bare(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"


def _keys(name: str, arguments: dict[str, Any], line: str = "") -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    pairs = "".join(f"<arg_key>{key}</arg_key>{line}<arg_value>{text}</arg_value>{line}" for key, text in texts.items())
    return f"<tool_call>{name}{line}{pairs}</tool_call>"


def _kimi(name: str, arguments: dict[str, Any], number: int = 0) -> str:
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return f"{head}{json.dumps(arguments)}<|tool_call_end|>"


def _invoke(name: str, arguments: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts.items())
    return f'<invoke name="{name}">\n{parameters}</invoke>'


def _action(name: str, arguments: dict[str, Any], id: str = '"tool_call_id": "0", ') -> str:
    return f'{{{id}"tool_name": "{name}", "parameters": {json.dumps(arguments)}}}'


_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_ALL, _END_OF_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = (_ALL, _END_OF_ALL, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)  # fmt: skip
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_COHERE = ("<|START_ACTION|>", "<|END_ACTION|>")
_GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')
_GEMMAS = (
    '<|tool_call>call:weather{city:<|"|>Kiel<|"|>,days:2}<tool_call|>',
    '<|tool_call>call:add{a:-7,exact:true,unit:<|"|>kg<|"|>,more:[1,2]}<tool_call|>',
)
W, A = _object("weather", CITY), _object("add", SUM)
H = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(CITY)}"
CASES = (
    Case(
        "hermes", '<tool_call>{"name": ', ("<tool_call>", "</tool_call>"), f"<tool_call>\n{W}\n</tool_call>",
        f"<tool_call>\n{W}\n</tool_call>\n<tool_call>{A}</tool_call>", len("<tool_call>"),
    ),
    Case(
        "llama3_json", '"name": function name, "parameters"', ("<|python_tag|>",), _object("weather", CITY, "parameters"), None,
        len('{"name": "weather"'),
    ),
    Case(
        "mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]",), f"[TOOL_CALLS] [{W}]", f"[TOOL_CALLS][{W}, {A}]", len("[TOOL_CALLS]"),
    ),
    Case(
        "mistral", "[TOOL_CALLS][CALL_ID]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        f"[TOOL_CALLS]weather[CALL_ID]Ab3dE6gHi[ARGS]{json.dumps(CITY)}",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(CITY)}[TOOL_CALLS]add[ARGS]{json.dumps(SUM)}", len("[TOOL_CALLS]"),
    ),
    Case(
        "qwen3_coder", "<tool_call>\n<function=", ("<tool_call>", "</tool_call>"), _xml("weather", CITY),
        _xml("weather", CITY) + "\n" + _xml("add", SUM), len("<tool_call>"),
    ),
    Case(
        "qwen3_coder", "<tool_call>\n<function=", ("<tool_call>", "</tool_call>"), _xml("weather", CITY)[12:-13],
        _xml("weather", CITY)[12:-13] + _xml("add", SUM)[12:-13], len("<function="),
    ),
    Case(
        "granite", "<|tool_call|> followed by a JSON list", ("<|tool_call|>",), f"<|tool_call|>[{W}]",
        f"<|tool_call|> [{W}, {A}]", len("<|tool_call|>"),
    ),
    Case(
        "granite", "<|tool_call|> followed by a JSON list", (), f"<tool_call>[{W}]", f"<tool_call>[{W}, {A}]",
        len("<tool_call>"),
    ),
    Case("phi4_mini_json", "functools[", (), f"functools[{W}]", f"functools[{W}, {A}]", len("functools[")),
    Case(
        "phi4_mini_json", "", ("<|tool_call|>", "<|/tool_call|>"), f"<|tool_call|>[{W}]<|/tool_call|>",
        f"<|tool_call|>[{W}, {A}]<|/tool_call|>", len("<|tool_call|>"),
    ),
    Case(
        "deepseek_v3", "<｜tool▁calls▁begin｜>```json", _DEEPSEEK, f"{_ALL}{_fenced('weather', CITY)}{_END_OF_ALL}",
        f"{_ALL}{_fenced('weather', CITY)}\n{_fenced('add', SUM)}{_END_OF_ALL}", len(_ALL),
    ),
    Case(
        "deepseek_v31", "<｜tool▁calls▁begin｜>", _DEEPSEEK, f"{_ALL}{_bare('weather', CITY)}{_END_OF_ALL}",
        f"{_ALL}{_bare('weather', CITY)}{_bare('add', SUM)}{_END_OF_ALL}", len(_ALL),
    ),
    Case(
        "glm45", "<tool_call><arg_key>", _GLM, _keys("weather", CITY, "\n"), f"{_keys('weather', CITY)}\n{_keys('add', SUM)}",
        len("<tool_call>"),
    ),
    Case(
        "pythonic", "[func_name1(", (), "[weather(city='Kiel', days=2)]",
        '[weather(city="Kiel", days=2), add(a=-7, exact=True, unit="kg", more=[1, 2])]', len("[weather("),
    ),
    Case(
        "pythonic", "<|tool_call_start|>", ("<|tool_call_start|>", "<|tool_call_end|>"),
        '<|tool_call_start|>[weather(city="Kiel", days=2)]<|tool_call_end|>',
        "<|tool_call_start|>[weather(city='Kiel', days=2),add(a=-7,exact=True,unit='kg',more=[1,2])]<|tool_call_end|>",
        len("<|tool_call_start|>"),
    ),
    Case(
        "kimi_k2", _KIMI[0], _KIMI, f"{_KIMI[0]}{_kimi('weather', CITY)}{_KIMI[1]}",
        f"{_KIMI[0]}{_kimi('weather', CITY)}\n{_kimi('add', SUM, 12)}{_KIMI[1]}", len(_KIMI[0]),
    ),
    Case(
        "kimi_k2", _KIMI[0], _KIMI, _kimi("weather", CITY), f"{_kimi('weather', CITY)}{_kimi('add', SUM)}",
        len("<|tool_call_begin|>"),
    ),
    Case(
        "minimax_m2", "<minimax:tool_call>", _MINIMAX, f"{_MINIMAX[0]}\n{_invoke('weather', CITY)}\n{_MINIMAX[1]}",
        f"{_MINIMAX[0]}\n{_invoke('weather', CITY)}\n{_invoke('add', SUM)}\n{_MINIMAX[1]}", len(_MINIMAX[0]),
    ),
    Case(
        "minimax", '<tool_calls>\n{"name": <tool-name>', ("<tool_calls>", "</tool_calls>"), f"<tool_calls>\n{W}\n</tool_calls>",
        f"<tool_calls>\n{W}\n{A}\n</tool_calls>", len("<tool_calls>"),
    ),
    Case(
        "cohere_command3", _COHERE[0], _COHERE, f"{_COHERE[0]}[{_action('weather', CITY, '')}]{_COHERE[1]}",
        f"{_COHERE[0]}[{_action('weather', CITY)},\n {_action('add', SUM, '')}]{_COHERE[1]}", len(_COHERE[0]),
    ),
    Case("gemma4", "<|tool_call>call:", _GEMMA, _GEMMAS[0], "".join(_GEMMAS), len("<|tool_call>")),
    Case("harmony", "<|channel|>analysis<|message|>", MARKS, H, None, H.index("functions")),
)  # fmt: skip


def core_of(case: Case, kind: str) -> Tokenizer:
    """A tokenizer in which marks are "special" tokens, "added" ones, or "spelt", and then share tokens with what follows."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    corpus = [case.one, case.two or "", *(f"{case.one[: case.begins]}{more}" for more in ("x", "{", " {", "\n{", "[", "}", "zz"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # a long text is one word: a few merges of its ends, and none of a whole call
    pieces = [text[place : place + size] for text in corpus for size in (2, 3, 5) for place in range(len(text) - size + 1)]
    made.train_from_iterator(pieces * 2, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([END])
    if kind != "spelt":
        special = kind == "special"
        made.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in case.marks])
        if special:
            made.add_special_tokens(list(case.marks))
    return made


def tokens_of(case: Case, kind: str) -> tokenizer.Tokenizer:
    """The same tokenizer as the library reads it."""
    return tokenizer.Tokenizer(core_of(case, kind), named={"eos_token": END})
