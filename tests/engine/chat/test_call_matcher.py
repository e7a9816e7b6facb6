"""Calls that a model begins follow their functions' schemas: on masks alone, for every syntax, and in an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rooftile.engine import LLM
from rooftile.engine.chat.harmony.reader import HarmonyReader
from rooftile.engine.chat.parts import read_whole
from rooftile.engine.chat.thought_formats import FORMATS, HARMONY
from rooftile.engine.chat.tools.constraint import constraint_of
from rooftile.engine.chat.tools.use import ToolUse, read_use
from rooftile.engine.sampling.grammar import Grammars
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.steer import steering_of
from rooftile.engine.sampling.steering import Steering, allows
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.engine.chat.tools.syntaxes import CASES, CITY, END, SPARE, SUM, TOOLS, Case, core_of, tokens_of

pytest.importorskip("llguidance", reason="llguidance is not installed")
KINDS = ("special", "added", "spelt")
NAMES = [f"{case.name}{n}" for n, case in enumerate(CASES)]
THINK = next(form for form in FORMATS if form.name == "think")


def use_of(choice: Any = None, several: bool | None = None, tools: Any = TOOLS) -> ToolUse:
    found = read_use(tools, choice, several)
    assert found is not None
    return found


def steered(
    case: Case, own: Tokenizer, use: ToolUse, *, prompt: str = "hi", thoughts: Any = None, budget: int | None = None
) -> Steering:
    calls = constraint_of(case.syntax, use, own.added_id)
    assert calls is not None
    params = SamplingParams(calls=calls, thinks=thoughts is not None, thinking_token_budget=budget)
    grammars, vocabulary = Grammars(own, own.vocab_size + SPARE, own.eos_ids), own.vocab_size + SPARE
    assert params.grammar is not None
    found = steering_of(
        own.encode(prompt, special=False), params, grammars.compile(params.grammar), ends=frozenset(own.eos_ids),
        vocabulary=vocabulary, tokenizer=own, thoughts=thoughts, grammars=grammars,
    )  # fmt: skip
    assert found is not None
    return found


def allowed(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def says(steering: Steering, own: Tokenizer, text: str) -> str:
    """The part of a text that a model gets out that wants to say it, by the longest token that may come each time."""
    ids = own.encode(text, special=False)
    said, left = "", text
    while left and not steering.over:
        token = ids.pop(0) if ids else None
        if token is None or not allows(steering.mask, token):
            fit = [
                id
                for id in allowed(steering.mask)
                if id < own.vocab_size and own.text_of(id) and left.startswith(own.text_of(id))
            ]
            if not fit:
                break
            token = max(fit, key=lambda id: len(own.text_of(id)))
            ids = own.encode(left[len(own.text_of(token)) :], special=False)
        steering.take(token)
        said, left = said + own.text_of(token), left[len(own.text_of(token)) :]
    return said


def draw(steering: Steering, own: Tokenizer, seed: int, most: int = 300) -> list[int]:
    """Tokens of a model that says anything that it may; it likes to come to an end."""
    rng, found = random.Random(seed), list[int]()
    while len(found) < most and not steering.over:
        may = allowed(steering.mask)
        ending = [token for token in may if token < own.vocab_size and any(c in '"}])>' for c in own.text_of(token))]
        token = rng.choice(ending if ending and rng.random() < 0.6 else may)
        if token in own.eos_ids:
            break
        found.append(token)
        steering.take(token)
    return found


def check(name: str, arguments: str) -> None:
    """Checks a call against its schema."""
    found = json.loads(arguments)
    if name == "weather":
        assert {"city"} <= found.keys() <= {"city", "days"}
        assert isinstance(found["city"], str)
        assert len(found["city"]) <= 30
        assert type(found.get("days", 0)) is int
    else:
        assert name == "add"
        assert {"a"} <= found.keys() <= SUM.keys()
        assert type(found["a"]) is int
        assert found.get("exact", True) in (True, False)
        assert found.get("unit", "m") in ("m", "kg")
        assert all(type(each) is int for each in found.get("more", []))


def calls_in(case: Case, own: Tokenizer, text: str) -> list[Any]:
    return read_whole(case.syntax.reader(use_of().tools), text).calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_what_models_write_is_let_through(case: Case, kind: str) -> None:
    own = tokens_of(case, kind)
    texts = [case.one] if case.two is None else [case.one, case.two]
    for text in texts:
        for choice in (None, "required"):
            steering = steered(case, own, use_of(choice))
            assert says(steering, own, text) == text
            assert steering.over or allows(steering.mask, own.eos_ids[0])
        due = [("weather", CITY), ("add", SUM)][: 1 if text == case.one else 2]
        assert [(each.name, json.loads(each.arguments)) for each in calls_in(case, own, text)] == due
    named = steered(case, own, use_of({"type": "function", "function": {"name": "weather"}}, False))
    assert says(named, own, case.one) == case.one
    assert named.over
    # free text is free to its end, and no call can be avoided where one is required
    steering = steered(case, own, use_of())
    assert says(steering, own, "x < y > z: [1] {2}.") == "x < y > z: [1] {2}."
    assert allows(steering.mask, own.eos_ids[0])
    assert len(says(steered(case, own, use_of("required")), own, "good day")) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_from_its_beginning_on_a_call_is_right(case: Case, kind: str) -> None:
    """Whatever a model draws behind a beginning, cut at every character of it, is a call of a function by its schema."""
    own = tokens_of(case, kind)
    use = use_of(None, False)
    ended = left_out = 0
    for seed in range(16):
        steering, begins = steered(case, own, use), case.begins - seed % 4 * (kind == "spelt")
        said = case.one[:begins]
        assert says(steering, own, said) == said
        ids, rest = own.encode(said, special=False), case.one[begins : case.begins]
        if rest:
            # tokens that complete the beginning, most of which go on
            fit = [id for id in range(own.vocab_size) if own.text_of(id).startswith(rest)]
            may = [id for id in fit if allows(steering.mask, id)]
            left_out += len(fit) - len(may)
            ids.append(random.Random(seed).choice(may))
            steering.take(ids[-1])
            assert len(allowed(steering.mask)) < own.vocab_size
        ids += draw(steering, own, seed)
        text = own.decode(ids, skip_special=False)
        calls = calls_in(case, own, text)
        for call in calls:
            if call.broken is None:
                check(call.name, call.arguments)
            else:
                assert not steering.over, (call, text)
        ended += steering.over
        assert len(calls) == 1 or not steering.over
    assert ended > 5
    assert left_out or kind != "spelt"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_wrong_calls_cannot_be_written(case: Case, kind: str) -> None:
    own = tokens_of(case, kind)
    for right, wrong in (("weather", "wither"), ("city", "town"), ("2", "two")):
        text = case.one.replace(right, wrong)
        # a name may be what begins a call
        if right in case.one[case.begins :]:
            said = says(steered(case, own, use_of()), own, text)
            assert len(said) < len(text)
            assert case.one.startswith(said.rstrip())


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_one_call_is_one_call(case: Case) -> None:
    own = tokens_of(case, "added")
    steering = steered(case, own, use_of(None, False))
    both = case.two or case.one * 2
    said = says(steering, own, both)
    assert len(said) < len(both)
    assert len(calls_in(case, own, said)) == 1
    if case.two is not None:
        assert says(steered(case, own, use_of()), own, case.two) == case.two


@pytest.mark.parametrize("case", CASES[:1], ids=NAMES[:1])
def test_thoughts_begin_no_calls(case: Case) -> None:
    own = tokens_of(case, "added")
    thought = f"I could {case.one.replace('city', 'town')} </think>\n\n"
    for budget in (None, 400):
        steering = steered(case, own, use_of(), prompt="<think>", thoughts=THINK, budget=budget)
        assert steering.free > 1
        assert says(steering, own, thought) == thought
        assert says(steering, own, case.one) == case.one
        assert len(says(steering, own, case.one.replace("city", "town"))) < len(case.one)
    # a budget closes the thought, and then a call is held to its grammar
    steering = steered(case, own, use_of(None, False), prompt="<think>", thoughts=THINK, budget=3)
    ids = []
    while len(ids) < 30 and (len(may := allowed(steering.mask)) == 1 or len(ids) < 3):
        ids.append(may[0])
        steering.take(may[0])
    assert own.decode(ids).endswith("</think>\n\n")
    assert says(steering, own, case.one) == case.one
    assert steering.over


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_fork_changes_nothing_in_its_origin(case: Case) -> None:
    own = tokens_of(case, "spelt")
    steering, alone = (steered(case, own, use_of()) for _ in range(2))
    for token in own.encode(f"{case.one} and", special=False):
        draw(steering.fork(), own, token, most=9)
        assert (steering.mask == alone.mask).all()
        if steering.over or not allows(steering.mask, token):
            break
        steering.take(token)
        alone.take(token)


def test_a_schema_that_no_grammar_follows_holds_no_call_up() -> None:
    """Arguments are any object then, unless a call must be made; a strict function is refused."""
    case, own = CASES[0], tokens_of(CASES[0], "added")
    tool = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string", "pattern": r"\bK"}}}}
    text = case.one.replace("days", "daze")
    assert says(steered(case, own, use_of(tools=[{"type": "function", "function": tool}])), own, text) == text
    for more, choice in (({"strict": True}, None), ({}, "required")):
        with pytest.raises(InvalidInput, match="the grammar cannot be used: look-around"):
            steered(case, own, use_of(choice, tools=[{"type": "function", "function": tool | more}]))
    # what a grammar only leaves out is no reason, unless the function is strict
    tool = {"name": "weather", "parameters": {"type": "object", "not": {"required": ["x"]}}}
    assert says(steered(case, own, use_of("required", tools=[{"type": "function", "function": tool}])), own, text) == text
    with pytest.raises(InvalidInput, match="the schema has not, which is not supported"):
        steered(case, own, use_of("required", tools=[{"type": "function", "function": tool | {"strict": True}}]))


def test_very_many_functions_have_a_grammar() -> None:
    case, own = CASES[0], tokens_of(CASES[0], "added")
    properties = {f"p{n}": {"type": "string", "description": "a: b"} for n in range(12)}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object", "properties": properties}}}
        for n in range(128)
    ]
    text = '<tool_call>\n{"name": "f127", "arguments": {"p3": "x"}}\n</tool_call>'
    for choice in (None, "required"):
        assert says(steered(case, own, use_of(choice, tools=tools)), own, text) == text


def test_texts_in_tags_follow_what_a_schema_says_of_strings() -> None:
    case = next(case for case in CASES if case.name == "qwen3_coder")
    own = tokens_of(case, "added")

    def said(text: str, **function: Any) -> str:
        tools = [{"type": "function", "function": {"name": "f", **function}}]
        return says(steered(case, own, use_of(None, False, tools)), own, f"<tool_call>\n<function=f>\n{text}")

    end = "</function>\n</tool_call>"
    one = f"<parameter=a>\nx <y>\n\n</parameter>\n{end}"
    assert said(end).endswith(end)
    assert said(one).endswith("<function=f>\n<")
    assert said(one, parameters={"type": "object"}).endswith(end)
    optional = {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}
    assert said(one, parameters={"type": "object", "properties": {"a": optional}}).endswith(end)
    short = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 6}}}
    assert said(one, parameters=short).endswith(end)
    assert said(one.replace("y", "yy"), parameters=short).endswith("x <yy>\n")
    nested = {"$ref": "#/$defs/pair"}
    pair = {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "minItems": 2}
    parameters = {"type": "object", "properties": {"a": nested}, "required": ["a"], "$defs": {"pair": pair}}
    assert said(f"<parameter=a>\n[1, 2]\n</parameter>\n{end}", parameters=parameters).endswith(end)
    assert said(end, parameters=parameters).endswith("<function=f>\n<")
    assert said("<parameter=a>\n[1, 2, 3]", parameters=parameters).endswith("[1, 2")
    with pytest.raises(InvalidInput, match="the function f is strict, and its schema has pattern: arguments in this model"):
        said(one, parameters={"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, strict=True)


def calling(name: str, before: str, after: str) -> Callable[..., bool]:
    """Tells whether a function may be called with arguments, as they are written in a syntax."""
    case = next(case for case in CASES if case.name == name)
    own = tokens_of(case, "added")

    def goes(arguments: str, **function: Any) -> bool:
        tools, text = [{"type": "function", "function": {"name": "f", **function}}], f"{before}{arguments}{after}"
        steering = steered(case, own, use_of(None, False, tools))
        done = says(steering, own, text) == text
        if done:
            (call,) = read_whole(case.syntax.reader(use_of(tools=tools).tools), text).calls
            assert steering.over
            assert call.broken is None
        return done

    return goes


def of(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or []}


def test_values_of_gemma_follow_a_schema() -> None:
    goes = calling("gemma4", "<|tool_call>call:f{", "}<tool_call|>")
    assert goes("")
    assert not goes("a:1")
    assert goes('x:1,y:[{a.b:null},1.5e3,<|"|>}"\n\\<|"|>]', parameters={"type": "object"})
    parameters = of(["b"], a={"type": "integer"}, b={"type": "number"}, c={"type": "string", "maxLength": 2})
    for arguments, due in (
        ("b:1", True), ("a:1,b:2.5", True), ('b:1, c:<|"|>x}<|"|>', True), ("", False), ("a:1", False), ("b:1,a:2", False),
        ('a:1.5,b:1', False), ('b:1,c:<|"|>abc<|"|>', False), ("b:1,c:ab", False), ("b:1,d:1", False),
    ):  # fmt: skip
        assert goes(arguments, parameters=parameters) == due, arguments
    tree = of(["a"], a={"$ref": "#/$defs/t"}) | {"$defs": {"t": of(["v"], v={"type": "boolean"}, t={"$ref": "#/$defs/t"})}}
    assert goes("a:{v:true,t:{v:false}}", parameters=tree)
    assert not goes("a:{t:{v:true}}", parameters=tree)
    some = of(["a"], a={"enum": ["it's", "", 1, None, [1, {"b": "x"}]]})
    right, wrong = ('<|"|>it\'s<|"|>', '<|"|><|"|>', "1", "null", "None", '[1,{b:<|"|>x<|"|>}]'), ("2", '<|"|>it<|"|>', "[1]")
    assert [goes(f"a:{value}", parameters=some) for value in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)
    with pytest.raises(InvalidInput, match="the function f is strict, and its schema has minLength"):
        goes('a:<|"|><|"|>', parameters=of(["a"], a={"type": "string", "minLength": 1}), strict=True)


def test_literals_of_python_follow_a_schema() -> None:
    goes = calling("pythonic", "[f(", ")]")
    whole, text = {"type": "integer"}, {"type": "string"}
    assert goes("")
    assert not goes("a=1")
    assert goes("x=1, y=[{'a': None}, 1.5e3]", parameters={"type": "object"})
    for required, right, wrong in (
        ([], ("", "a=1", "b=2, c='x'", "c='x'", 'a=1,c="x"'), (",", "b=1,", "b=2, a=1", "c=1")),
        (["b"], ("b=1", "a=1, b=2", "b=1 , c='x'"), ("", "a=1", "c='x'", "a=1, c='x'")),
        (["a", "c"], ("a=1, c=''", "a=1, b=2, c=''"), ("a=1", "c=''", "b=2, c=''")),
    ):
        parameters = of(required, a=whole, b=whole, c=text)
        assert [goes(each, parameters=parameters) for each in right] == [True] * len(right), required
        assert [goes(each, parameters=parameters) for each in wrong] == [False] * len(wrong), required
    one = of(["a"], a={"anyOf": [{"type": "array", "items": whole, "minItems": 1, "maxItems": 2}, {"type": "null"}]})
    assert [goes(f"a={value}", parameters=one) for value in ("[1]", "[1, 2]", "None", "[]", "[1, 2, 3]", "1")] == [True] * 3 + [
        False
    ] * 3
    tree = of(["a"], a={"$ref": "#/$defs/t"}) | {"$defs": {"t": of(["v"], v=whole, t={"$ref": "#/$defs/t"})}}
    assert goes("a={'v': 1, 't': {\"v\": 2}}", parameters=tree)
    assert not goes("a={'t': {'v': 2}}", parameters=tree)
    some = of(["a"], a={"enum": ["it's", 1, None]})
    assert [goes(f"a={value}", parameters=some) for value in ('"it\'s"', "1", "None", "2", "'it'")] == [True] * 3 + [False] * 2
    short = of(["a"], a={"type": "string", "minLength": 1, "maxLength": 2})
    assert [goes(f"a={value}", parameters=short) for value in ("'a'", "'\\n\\u00e9'", "''", "'abc'")] == [True] * 2 + [False] * 2
    with pytest.raises(InvalidInput, match="the function f is strict, and its schema has minimum"):
        goes("a=1", parameters=of(["a"], a={"type": "integer", "minimum": 1}), strict=True)
    with pytest.raises(InvalidInput, match="its schema has maxLength"):
        goes("a=1", parameters=of(["a"], a={"type": "string", "maxLength": 5000}), strict=True)


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ tools }} <tool_call>{\"name\": "
ASKED = [[{"role": "user", "content": text}] for text in ("ab", "call a function")]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that begins calls again and again, with the bias of its requests."""
    folder, core = tmp_path_factory.mktemp("speaker"), core_of(CASES[0], "special")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=core.get_vocab_size() + SPARE, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def test_calls_of_an_engine_follow_their_schemas(speaker: Path) -> None:
    """The same ones with drafts, with several samples, and where answers are preempted."""
    sizes = {"device": "cpu", "max_model_len": 2048}
    own = Tokenizer.from_folder(speaker)
    # what ends strings and objects is likely, and so are calls
    likely = {id: 4.0 for id in range(own.vocab_size) if '"' in own.text_of(id) or "}" in own.text_of(id)}
    begins, ends = own.added_id("<tool_call>"), own.added_id("</tool_call>")
    assert begins is not None
    assert ends is not None
    bias = likely | {begins: 9.0, ends: 9.0}
    asked = [SamplingParams(max_tokens=220, seed=n, n=2, logit_bias=bias, ignore_eos=True) for n in (3, 5)]
    plain = LLM(speaker, num_blocks=400, **sizes)
    due = plain.chat(ASKED, asked, tools=TOOLS)
    ended = 0
    for answer in (answer for output in due for answer in output.outputs):
        assert answer.tool_calls
        for call in answer.tool_calls:
            if call.broken is None:
                check(call.name, call.arguments)
        assert all(call.broken is None for call in answer.tool_calls[:-1])
        ended += sum(call.broken is None for call in answer.tool_calls)
    assert ended > 8
    lookup = {"method": "lookup", "tokens": 5, "shortest": 1, "max_batch": 1000}
    drafting = LLM(speaker, num_blocks=400, speculative=lookup, **sizes)
    for other in (drafting, LLM(speaker, num_blocks=2048 // 16 + 1, **sizes)):
        found = other.chat(ASKED, asked, tools=TOOLS)
        assert [[a.token_ids for a in o.outputs] for o in found] == [[a.token_ids for a in o.outputs] for o in due]
    assert drafting.engine.speculator is not None
    assert drafting.engine.speculator.counts["accepted"] > 0
    # a stop string ends a call like other text
    (stopped,) = plain.chat(ASKED[:1], SamplingParams(max_tokens=99, seed=3, logit_bias=bias, stop=["weath", "add"]), tools=TOOLS)
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].text.endswith('"')
    # beams follow no grammar, and are left as they are
    (searched,) = plain.chat(ASKED[:1], SamplingParams(max_tokens=9, temperature=0, beam_width=2), tools=TOOLS)
    assert searched.outputs[0].finish_reason == "length"
    with pytest.raises(InvalidInput, match="tool_choice asks for a call, and a beam search follows no grammar"):
        plain.chat(ASKED[:1], SamplingParams(max_tokens=9, temperature=0, beam_width=2), tools=TOOLS, tool_choice="required")
    with pytest.raises(InvalidInput, match="min_tokens is given with a tool_choice that asks for a call"):
        plain.chat(ASKED[:1], SamplingParams(max_tokens=9, min_tokens=2), tools=TOOLS, tool_choice="required")


HEADERS = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    " to=functions.weather<|channel|>commentary json<|message|>", "<|channel|>analysis to=functions.weather<|message|>",
)  # fmt: skip


def channels() -> tuple[Case, Tokenizer]:
    """The case of gpt-oss, in which other marks end an answer than a message."""
    case = next(case for case in CASES if case.name == "harmony")
    return case, Tokenizer(core_of(case, "special"), named={"eos_token": "<|return|>"})


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("budget", [None, 90])
def test_gpt_oss_begins_calls_in_headers_alone(header: str, budget: int | None) -> None:
    """A thought and a text may speak of calls; behind a header the arguments follow their schema."""
    case, own = channels()
    prompt = "<|start|>user<|message|>to=functions.weather<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>I write to=functions.none {<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>to=functions.none, then.<|end|><|start|>assistant"
    call = header + json.dumps(CITY)

    def steering() -> Steering:
        return steered(case, own, use_of(), prompt=prompt, thoughts=HARMONY, budget=budget)

    assert says(steering(), own, thought + said + call) == thought + said + call
    wrong = thought + header + json.dumps(CITY).replace("city", "town")
    got = says(steering(), own, wrong)
    assert got.startswith(thought + header + '{"')
    assert "town" not in got
    assert "none" not in says(steering(), own, call.replace(".weather", ".none"))
    # the prompt's last turn says where the answer begins
    inside = steered(case, own, use_of(), prompt=prompt + "<|channel|>final<|message|>Write", thoughts=HARMONY, budget=budget)
    assert says(inside, own, " to=functions.none {") == " to=functions.none {"
    assert inside.free >= 3


def test_gpt_oss_is_never_left_without_a_token() -> None:
    """A budget that is spent closes channels, and a call's grammar has two of them: one is left to both."""
    case, own = channels()
    for seed in range(10):
        steering = steered(case, own, use_of(), thoughts=HARMONY, prompt="<|start|>assistant", budget=seed % 2)
        says(steering, own, " to=functions.add<|channel|>")
        draw(steering, own, seed, most=120)


def test_gpt_oss_must_call_behind_its_thought() -> None:
    case, own = channels()
    for seed in range(8):
        for choice, budget in (("required", 30), ({"type": "function", "function": {"name": "add"}}, 4)):
            steering = steered(case, own, use_of(choice), thoughts=HARMONY, prompt="<|start|>assistant", budget=budget)
            ids = draw(steering, own, seed, most=600)
            found = read_whole(HarmonyReader(use_of().tools), own.decode(ids, skip_special=False))
            (call,) = found.calls
            assert found.content == ""
            if steering.over:
                check(call.name, call.arguments)
            assert choice == "required" or call.name == "add"
