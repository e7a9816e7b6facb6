"""A folder's tokenizer is the one that Transformers reads of it; what it cannot read, it says in one sentence."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerBase

from rooftile.engine.text import chat_template
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.engine.folders import CORPUS, KINDS, SPECIAL, TEXTS, core, save

CHAT = [{"role": "user", "content": "Hello, the stop?"}, {"role": "assistant", "content": " naïve 😀"}]


def agree(folder: Path, texts: list[str] | None = None) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """Ours and theirs, after they have agreed on texts and on random ids."""
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS + CORPUS if texts is None else texts:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special), text
    draw = random.Random(0)
    for _ in range(200):
        ids = draw.choices(range(ours.vocab_size), k=draw.randrange(12))
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert [ours.token(id) for id in ids] == theirs.convert_ids_to_tokens(ids)
    return ours, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    ours, theirs = agree(save(kind, tmp_path))
    assert ours.eos_ids == (theirs.eos_token_id,)
    for prompt in (True, False):
        due = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert ours.chat(CHAT, prompt) == due


def test_the_kinds_do_what_they_are_there_for(tmp_path: Path) -> None:
    fallback = Tokenizer.from_folder(save("byte_fallback", tmp_path / "a"))
    assert len(fallback.byte_ids) == 256
    euro = fallback.encode("€", special=False)[-3:]
    assert bytes(fallback.byte_ids[id] for id in euro) == "€".encode()
    assert fallback.decode([fallback.encode("the", special=False)[0]]) == "the"
    assert not Tokenizer.from_folder(save("byte_level", tmp_path / "b")).byte_ids
    assert Tokenizer.from_folder(save("cleaned", tmp_path / "c")).cleans_up
    # Transformers spares BPE
    assert not Tokenizer.from_folder(save("byte_level", tmp_path / "d", clean_up_tokenization_spaces=True)).cleans_up


def test_tokens_that_only_the_settings_add(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    # the end of text is a token of the vocabulary that tokenizer.json does not call special; the rest is new
    settings["eos_token"] = "the"
    alike = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
    settings["pad_token"] = {"__type": "AddedToken", "content": "<pad>"} | alike
    settings["extra_special_tokens"] = ["<|tool|>"]
    file.write_text(json.dumps(settings))
    ours, theirs = agree(tmp_path, [*TEXTS, "the <pad> x<|tool|>"])
    assert ours.decode(ours.encode("x<|tool|>the", special=False)) == "x"
    assert ours.eos_ids == (theirs.eos_token_id,)
    settings["added_tokens_decoder"] = {str(ours.vocab_size): {"content": "<late>", "special": False} | alike}
    file.write_text(json.dumps(settings))
    agree(tmp_path, [*TEXTS, "the <late> x"])
    settings["eos_token"] = "<late>"
    file.write_text(json.dumps(settings))
    ours, _ = agree(tmp_path, [*TEXTS, "the <late> x"])
    assert ours.is_silent(ours.eos_ids[0], True)


def test_an_older_folder(tmp_path: Path) -> None:
    save("byte_fallback", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>", "lstrip": False, "normalized": False}, "bos_token": "<|begin|>"})
    )
    ours, theirs = agree(tmp_path)
    assert ours.eos_ids == (theirs.eos_token_id,)


def test_ends_of_text_of_the_generation_settings(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 400, 5]}')
    end = core("byte_level").token_to_id("<|end|>")
    assert Tokenizer.from_folder(tmp_path).eos_ids == (end, 3, *([] if end == 400 else [400]), 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (end, 7)


def test_a_folder_cuts_no_request(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    made = core("byte_level")
    made.enable_truncation(4)
    made.enable_padding(length=4, pad_token="<|end|>")
    made.save(str(tmp_path / "tokenizer.json"))
    assert len(agree(tmp_path)[0].encode("the stop string stops here")) > 4
    assert len(Tokenizer.from_folder(tmp_path).encode("t")) == 2


@pytest.mark.parametrize("kind", [GPT2Tokenizer, LlamaTokenizer])
def test_classes_of_transformers(kind: type, tmp_path: Path) -> None:
    """Their saved tokenizer.json is read as they read it."""
    source = core("byte_level" if kind is GPT2Tokenizer else "byte_fallback")
    model = json.loads(source.to_str())["model"]
    made = kind(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], unk_token="<unk>")
    made.save_pretrained(tmp_path)
    agree(tmp_path)


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    model = json.loads(core("byte_level").to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ messages }}"}')
    ours, theirs = agree(tmp_path)
    assert theirs.is_fast
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.has_template


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Mine: pass\n")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", "code.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}')
    with pytest.raises(InvalidInput, match=r"has no tokenizer.json, and Transformers reads none"):
        Tokenizer.from_folder(tmp_path)
    core("byte_level").save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("x", special=False)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% for", "unexpected|end of"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{% include 'etc' %}", "no loader"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "run 1,000,000 steps without an end$"),
        ("{% macro m(n) %}{% for a in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(50) }}", "without an end$"),
        ("{{ raise_exception('two\n lines') }}", "messages: two lines$"),
    ],
)
def test_a_template_that_fails(template: str, reason: str, tmp_path: Path) -> None:
    save("byte_level", tmp_path, chat_template=template)
    with pytest.raises(InvalidInput, match=reason) as caught:
        Tokenizer.from_folder(tmp_path).chat(CHAT)
    assert "\n" not in str(caught.value)


def test_a_tracer_of_the_caller_goes_on_after_a_template(tmp_path: Path) -> None:
    """Debuggers and coverage trace the thread too, which a template's limit needs while it runs."""
    tokenizer = Tokenizer.from_folder(save("byte_level", tmp_path))
    tokenizer.chat(CHAT)

    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        tokenizer.chat(CHAT)
        found = sys.gettrace()
    finally:
        sys.settrace(before)
    assert found is tracer


def test_chat_refusals(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save("byte_level", tmp_path / "a"))
    with pytest.raises(InvalidInput, match="cannot write these messages: no system here"):
        tokenizer.chat([{"role": "system", "content": "x"}])
    with pytest.raises(InvalidInput, match="must be a list of at least one"):
        tokenizer.chat([])
    with pytest.raises(InvalidInput, match="a message is 'x'; must be a dictionary"):
        tokenizer.chat(["x"])
    with pytest.raises(InvalidInput, match=r"may have at most 20 bytes"):
        tokenizer.chat(CHAT, most_bytes=20)
    silent = Tokenizer.from_folder(save("byte_level", tmp_path / "b", chat_template=None))
    assert not silent.has_template
    with pytest.raises(InvalidInput, match="has no chat template; send a prompt"):
        silent.chat(CHAT)


def test_several_templates(tmp_path: Path) -> None:
    save("byte_level", tmp_path, chat_template=None)
    file = tmp_path / "tokenizer_config.json"
    both = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": both}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.chat(CHAT)) == "plain"
    # a file of its own goes first
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.chat(CHAT)) == "file"


def test_texts_that_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save("byte_level", tmp_path))
    assert tokenizer.encode("é", most_bytes=2)
    with pytest.raises(InvalidInput, match="has 4 bytes; may have at most 3"):
        tokenizer.encode("éé", most_bytes=3)
    with pytest.raises(InvalidInput, match="has 4194305 characters; may have at most 4194304 bytes"):
        tokenizer.encode("x" * (4 * 2**20 + 1))
    with pytest.raises(InvalidInput, match="character 1 of a text is half of a surrogate pair"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidInput, match="a text is a bytes"):
        tokenizer.encode(b"x")


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nowhere is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"has no tokenizer.json, and Transformers reads none"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"tokenizer.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InvalidInput, match=r"tokenizer_config.json holds list; must be a JSON object"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"tokenizer_config.json is not JSON"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_bytes_of_tokens(kind: str, tmp_path: Path) -> None:
    """Together they are the text's bytes, also where a token is half of a character; each keeps its leading space."""
    tokenizer = Tokenizer.from_folder(save(kind, tmp_path))
    text = "\u00e9\U0001f600na\u00efve\u2013\u00fc<|end|><think>"
    ids = tokenizer.encode(text, special=False)
    assert any("\ufffd" in tokenizer.text_of(id) for id in ids)
    space = b"" if kind == "byte_level" else b" "
    assert b"".join(tokenizer.bytes_of(id) for id in ids) == space + text.encode()
    assert tokenizer.first_text_of(ids[0]) == tokenizer.text_of(ids[0]).removeprefix(space.decode())
    assert tokenizer.bytes_of(10**6) == b""


def test_ids_without_a_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save("byte_level", tmp_path))
    assert tokenizer.token(tokenizer.vocab_size) == ""
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("x", special=False)]) == "x"
    assert tokenizer.is_silent(tokenizer.vocab_size, False)
    special = tokenizer.encode(SPECIAL[0], special=False)[0]
    assert tokenizer.is_silent(special, True)
    assert not tokenizer.is_silent(special, False)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"eos_token": {"x": 1}}, "{'x': 1} for a token; must be a string, or an object with its content"),
        ({"bos_token": 5}, "5 for a token; must be a string"),
        ({"added_tokens_decoder": {"abc": {"content": "q"}}}, "added_tokens_decoder {'abc': {'content': 'q'}}; must be"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder [1]; must be an object with a token for each id"),
        ({"added_tokens_decoder": {"5": {}}}, "{} for a token; must be"),
        ({"added_tokens_decoder": {"5": {"content": "z", "lstrip": "x"}}}, "a token with {'lstrip': 'x'}; must be true or false"),
        ({"extra_special_tokens": 5}, "extra tokens 5; must be a list of them, or an object"),
        ({"additional_special_tokens": [{"a": 1}]}, "{'a': 1} for a token"),
        ({"chat_template": [{"nam": "a"}]}, "chat_template [{'nam': 'a'}]; must be a template, or a list of them"),
    ],
    ids=str,
)
def test_strange_settings(settings: dict[str, object], sentence: str, tmp_path) -> None:
    folder = save("byte_level", tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(InvalidInput) as raised:
        Tokenizer.from_folder(folder)
    assert str(raised.value).startswith("the tokenizer's settings have " + sentence)


def test_a_template_that_is_no_text(tmp_path) -> None:
    folder = save("byte_level", tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"chat_template.jinja is not UTF-8 text \(invalid start byte at byte 0\)"):
        Tokenizer.from_folder(folder)


def test_a_chat_needs_jinja2(tmp_path, monkeypatch) -> None:
    tokenizer = Tokenizer.from_folder(save("byte_level", tmp_path))
    chat_template._compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InvalidInput, match="a chat template needs the package jinja2; pip install jinja2"):
        tokenizer.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "{% set y = 1 %}{% generation %}{% set y = 2 %}<{{ y }}>{% endgeneration %}{{ y }}",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}{{ '<é>' | tojson(ensure_ascii=true) }}",
        "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}{{ nothing }}",
        "  {% if true %}\n  a\n  {%- endif %}\n b {#- c #}",
    ],
)
def test_what_transformers_gives_to_templates_is_there(template: str, tmp_path: Path) -> None:
    folder = save("byte_level", tmp_path, chat_template=template)
    theirs = AutoTokenizer.from_pretrained(folder)
    due = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.from_folder(folder).chat(CHAT) == due


def test_neither_package_is_imported_before_it_is_needed() -> None:
    """Reading this module costs nothing to those who serve ids."""
    names = "{'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)"
    code = f"import sys; import rooftile.engine.text.tokenizer, rooftile.engine.text.detokenizer; print({names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
