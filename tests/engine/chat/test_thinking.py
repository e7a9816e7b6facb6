"""Thoughts are split off answers, the same however the text is cut; the prompt's end says where an answer begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from rooftile.engine.chat.harmony.reader import HarmonyReader
from rooftile.engine.chat.parts import Content, Part, PlainReader, Thought, joined, read_whole
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.engine.chat.thought_formats import FORMATS, HARMONY, NAMES, Stage, ThoughtFormat, choose_format, stage_of
from rooftile.engine.text.chat_template import render
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from rooftile.server.http.openai.conversation import THOUGHTS
from tests.engine.folders import core

BLOCKS = [form for form in FORMATS if form is not HARMONY]
BY_NAME = {form.name: form for form in FORMATS}
THINK, GRANITE = BY_NAME["think"], BY_NAME["granite"]
STAGES: tuple[Stage, ...] = ("before", "inside", "after")
FOLDER = os.environ.get("ROOFTILE_CHAT_TEMPLATES")


def reader(form: ThoughtFormat = THINK, stage: Stage = "before") -> ThoughtReader:
    return ThoughtReader(form, stage, PlainReader())


def read(text: str, form: ThoughtFormat = THINK, stage: Stage = "before") -> tuple[str, str]:
    """The thought and the content of an answer."""
    found = read_whole(reader(form, stage), text)
    return found.thought, found.content


def in_pieces(made: ThoughtReader, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in made.feed(piece)]
    return joined([*parts, *made.finish()])


@pytest.mark.parametrize(
    ("stage", "text", "thought", "content"),
    [
        ("before", "<think>\nWhy not?\n</think>\n\nYes.", "Why not?", "Yes."),
        ("before", " \n<think>a</think> b", "a", "b"),
        ("before", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("before", "Yes. <think>a</think>", "", "Yes. <think>a</think>"),
        ("before", "  Yes.\n", "", "  Yes.\n"),
        ("before", "<thi", "", "<thi"),
        ("before", "</think>a", "", "</think>a"),
        ("before", "<think>never ends </thin", "never ends </thin", ""),
        ("inside", "Why not?\n</think>\n\nYes.\n", "Why not?", "Yes.\n"),
        # some models write the mark that is in their prompt
        ("inside", "<think>\nWhy not?</think>Yes.", "Why not?", "Yes."),
        ("inside", "</think>Yes.", "", "Yes."),
        ("inside", "a\n\nb </think>c</think>d", "a\n\nb", "c</think>d"),
        ("inside", "cut off \n", "cut off", ""),
        ("inside", "", "", ""),
        ("after", "\n<think>a</think>b", "", "\n<think>a</think>b"),
    ],
)
def test_forms_of_answers(stage: Stage, text: str, thought: str, content: str) -> None:
    assert read(text, stage=stage) == (thought, content)


def test_other_formats() -> None:
    assert read("Here is my thought process: a\n\nHere is my response: b", GRANITE) == ("a", "b")
    assert read("Here's my thought process: a\n\nHere's my response:\n\nb", GRANITE) == ("a", "b")
    assert read("Here is my thoughtful answer.", GRANITE) == ("", "Here is my thoughtful answer.")
    assert read("[THINK]a[/THINK]b", BY_NAME["mistral"]) == ("a", "b")
    assert read("<|channel>thought\na\n<channel|>b", BY_NAME["gemma4"]) == ("a", "b")
    assert read("Step 1\n[BEGIN FINAL RESPONSE]\nb", BY_NAME["apriel"], "inside") == ("Step 1", "b")


@st.composite
def texts(draw: st.DrawFn, form: ThoughtFormat) -> str:
    """Texts of marks, pieces of marks, spaces and words."""
    pieces = [*form.marks, *(mark[:cut] for mark in form.marks for cut in (1, len(mark) - 1)), " ", "\n", "a", "<", "word é"]
    return "".join(draw(st.lists(st.sampled_from(pieces), max_size=9)))


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_cut_gives_the_parts_of_the_whole(form: ThoughtFormat, data: st.DataObject) -> None:
    text, stage = data.draw(texts(form)), data.draw(st.sampled_from(STAGES))
    whole = reader(form, stage)
    due = in_pieces(whole, [text])
    for pieces in ([*text], [text[:cut] for cut in (len(text) // 2,)] + [text[len(text) // 2 :]], ["", *text, ""]):
        cut = reader(form, stage)
        assert in_pieces(cut, pieces) == due, (text, stage)
        assert (cut.begin, cut.end) == (whole.begin, whole.end)
    assert 0 <= whole.begin <= whole.end <= len(text)
    thought, content = read(text, form, stage)
    assert text[whole.begin : whole.end].strip(" \t\r\n").endswith(thought)
    assert text.endswith(content)
    # no part is empty, and no mark that ends a thought is in it
    assert all(part.text for part in due if isinstance(part, Thought | Content))
    assert not any(mark in thought for mark in form.ends)


@settings(max_examples=60, deadline=None)
@given(text=texts(THINK))
def test_what_is_told_early_stays(text: str) -> None:
    made, told = reader(), ""
    for letter in text:
        told += "".join(part.text for part in made.feed(letter) if isinstance(part, Thought))
    assert read(text)[0].startswith(told)


def test_formats_are_chosen_by_name_and_by_template() -> None:
    assert choose_format("{{ '</think>' }}") is THINK
    assert choose_format("write after 'Here is my thought process:' and </think>") is GRANITE
    assert choose_format("{{ 1 }}") is None
    assert choose_format(None) is None
    assert choose_format("{{ '</think>' }}", "none") is None
    assert choose_format(None, "qwen3") is choose_format(None, "deepseek_r1") is THINK
    assert set(BY_NAME) <= set(NAMES)
    for wrong in ("qwen", "", 5):
        with pytest.raises(InvalidInput, match="; must be auto, none, or a format of thoughts: harmony, mistral, "):
            choose_format(None, wrong)  # type: ignore[arg-type]


def tokenizer(kind: str = "byte_level", *added: str) -> Tokenizer:
    made = core(kind)
    made.add_tokens([AddedToken(each, special=False, normalized=False) for each in ("</think>", *added)])
    return Tokenizer(made)


@pytest.mark.parametrize(
    ("prompt", "stage"),
    [
        ("<|user|>Why?<|end|><|user|>assistant: ", "before"),
        ("<|user|>Why?<|end|><|user|><think>\n", "inside"),
        ("<|user|>Why?<|end|><|user|><think>", "inside"),
        ("<|user|>Why?<|end|><|user|><think>\n\n</think>\n\n", "after"),
        ("<|user|>Why?<|end|><|user|></think>", "after"),
        # what a user writes opens nothing, and an answer that is continued keeps its own marks
        ("<|user|>What is <think>?<|end|><|user|>", "before"),
        ("<|user|>Why?<|end|><|user|><think>So far", "inside"),
        ("<|user|>Why?<|end|><|user|><think>a</think>So far", "after"),
        ("<|user|>Why?<|end|><|user|>So far", "before"),
        # without a token between the turns only the very end counts
        ("User: what is <think>? Assistant:", "before"),
        ("User: why? Assistant: <think>\n", "inside"),
        ("User: why? Assistant: <think>\n</think> ", "after"),
    ],
)
def test_the_prompts_end_says_where_an_answer_begins(prompt: str, stage: Stage) -> None:
    own = tokenizer()
    assert stage_of(own, own.encode(prompt, special=False), THINK) == stage


def test_marks_of_several_tokens() -> None:
    own = tokenizer("byte_level", "<|channel>")
    assert stage_of(own, own.encode("<|user|><|channel>thought\nSo", special=False), BY_NAME["gemma4"]) == "inside"
    assert stage_of(own, own.encode("<|user|>Here is my thought process: a", special=False), GRANITE) == "inside"
    assert stage_of(own, [], THINK) == "before"


# how published templates end a prompt: with thinking on, off and not mentioned
DUE: dict[str, tuple[str, Stage, Stage, Stage]] = {
    "Qwen-Qwen3-0.6B": ("think", "before", "after", "before"),
    "Qwen3.5-4B": ("think", "inside", "after", "inside"),
    "HuggingFaceTB-SmolLM3-3B": ("think", "before", "after", "before"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("think", "inside", "inside", "inside"),
    "deepseek-ai-DeepSeek-V3.1": ("think", "inside", "after", "after"),
    "GLM-4.6": ("think", "before", "after", "before"),
    "GLM-4.7-Flash": ("think", "inside", "after", "inside"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("think", "inside", "after", "inside"),
    "MiniMax-M2": ("think", "inside", "inside", "inside"),
    "StepFun3.5-Flash": ("think", "inside", "inside", "inside"),
    "Kimi-K2-Thinking": ("think", "before", "before", "before"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "before", "after", "after"),
    "google-gemma-4-31B-it": ("gemma4", "before", "after", "after"),
    "ByteDance-Seed-OSS": ("seed_oss", "before", "before", "before"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "before", "before", "before"),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "inside", "inside", "inside"),
}


@pytest.mark.skipif(FOLDER is None, reason="ROOFTILE_CHAT_TEMPLATES names no folder of published templates")
@pytest.mark.parametrize("name", DUE)
def test_published_templates(name: str) -> None:
    template = (Path(FOLDER or "") / f"{name}.jinja").read_text(encoding="utf-8")
    form = choose_format(template)
    assert form is not None
    # the turns' tokens are added ones in the models' own tokenizers
    turns = ("<|im_start|>", "<|im_end|>", "<｜Assistant｜>", "<|assistant|>", "]~b]ai", "<|im_middle|>", "<|turn>", "[/INST]",
             "<|channel>", "<channel|>", "<seed:bos>", "<|begin_assistant|>", "<|CHATBOT_TOKEN|>")  # fmt: skip
    own = tokenizer("byte_level", *turns)
    found = []
    for variables in ({"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}, {}):
        named = {"bos_token": "<seed:bos>", "eos_token": "</s>"}
        text = render(template, [{"role": "user", "content": "Is <think> a word?"}], True, named, name, variables=variables)
        found.append(stage_of(own, own.encode(text, special=False), form))
    assert (form.name, *found) == DUE[name]


# templates that write the thought of the last answer
WRITE = (
    "Apriel-1.6-15b-Thinker-fixed", "Bielik-11B-v3.0-Instruct", "ByteDance-Seed-OSS", "Cohere2MoE", "GLM-4.6", "GLM-4.7-Flash",
    "LFM2.5-8B-A1B", "MiniMax-M2", "MiniMax-M3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen-Qwen3-0.6B", "Qwen3.5-4B",
    "Spark2.5", "StepFun3.5-Flash", "inclusionai-ling-3.0-flash", "openai-gpt-oss-120b", "openbmb-MiniCPM5-1B",
    "poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2",
)  # fmt: skip


@pytest.mark.skipif(FOLDER is None, reason="ROOFTILE_CHAT_TEMPLATES names no folder of published templates")
@pytest.mark.parametrize("name", WRITE)
def test_thoughts_of_published_templates_are_read_back(name: str) -> None:
    template = (Path(FOLDER or "") / f"{name}.jinja").read_text(encoding="utf-8")
    form = choose_format(template)
    assert form is not None
    thought = "So: é <x"
    answer = {"role": "assistant", "content": "ANSWER"} | dict.fromkeys(THOUGHTS, thought)
    written = render(template, [{"role": "user", "content": "QUESTION"}, answer], False, {"bos_token": "<s>"}, name)
    said = written[written.rfind("QUESTION") + len("QUESTION") :]
    if form is HARMONY:
        found = read_whole(HarmonyReader(None, "user<|message|>QUESTION"), said)
    else:
        begins = [place for mark in form.begins if (place := said.find(mark)) >= 0]
        # some templates write the mark into the prompt alone
        found = read_whole(reader(form, "before" if begins else "inside"), said[min(begins, default=said.find(thought)) :])
    assert found.thought == thought
    assert found.content.removeprefix("<|START_TEXT|>").startswith("ANSWER")
