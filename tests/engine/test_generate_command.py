"""`rooftile generate`: the texts are those of `LLM`, stdout has them alone, and what is wrong is one sentence."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

from rooftile.cli import main
from rooftile.engine import LLM, SamplingParams
from tests.engine.folders import save
from tests.engine.made_adapters import write_adapter
from tests.models.checkpoints import SMALL, saved

FEW = ("--device", "cpu", "--max-model-len", "64", "--num-blocks", "40", "--max-tokens", "12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420, "eos_token_id": 419})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    return save("byte_level", path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Runs a command line; returns its exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["generate", *words])
        out = capsys.readouterr()
        return int(left.value.code or 0), out.out, out.err

    return call


def texts(folder: Path, prompts: list, **settings) -> list[list[str]]:
    llm = LLM(folder, max_model_len=64, num_blocks=40)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, **settings))
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [[answer.text for answer in output.outputs] for output in outputs]


def test_one_prompt_gives_its_text_alone(run, folder: Path) -> None:
    ((due,),) = texts(folder, ["the roof"], temperature=0)
    code, out, err = run(str(folder), "-p", "the roof", "--temperature", "0", *FEW)
    assert (code, out) == (0, due + "\n")
    (line,) = err.splitlines()
    assert line.startswith("12 tokens in ")
    assert " tokens/s, the first after " in line
    assert line.endswith("; cache: " + str(LLM(folder, max_model_len=64, num_blocks=40).pages))


def test_several_prompts_stand_one_after_the_other(run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("a tile\nis no end\n", encoding="utf-8")
    asked = ["the roof", "naïve", "a tile\nis no end"]
    due = texts(folder, asked, temperature=0.9, seed=7, n=2)
    words = (str(folder), "-p", asked[0], "-p", asked[1], "--prompt-file", str(file), "--n", "2", "--seed", "7")
    code, out, _ = run(*words, "--temperature", "0.9", *FEW)
    heads = ["> the roof\n", "> naïve\n", "> a tile\n> is no end\n"]
    assert code == 0
    assert out == "\n".join(f"{head}[1]\n{one}\n\n[2]\n{two}\n" for head, (one, two) in zip(heads, due, strict=True))


def test_the_text_comes_in_pieces(folder: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is new is written; a terminal is not commanded by what a model writes."""

    class Terminal(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[str] = []

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return super().write(text)

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    ((due,),) = texts(folder, ["the roof"], temperature=2.0, seed=1)
    run(str(folder), "-p", "the roof", "--temperature", "2", "--seed", "1", *FEW)
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in due)
    assert screen.getvalue() == shown + "\n"
    assert len([piece for piece in screen.pieces if piece.strip("\n")]) > 4


@pytest.mark.parametrize("sign", ["\x1b", "\x07", "\x9b", "\r"])
def test_a_terminal_is_not_commanded(sign: str, folder: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.engine.text.detokenizer import Detokenizer
    from rooftile.engine.text.growing import TextSnapshot

    monkeypatch.setattr(Detokenizer, "snapshot", lambda self: TextSnapshot([f"a{sign}[2Jb\n\tc"], 1, [], 0))
    for terminal, due in ((True, "a\ufffd[2Jb\n\tc\n"), (False, f"a{sign}[2Jb\n\tc\n")):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", screen)
        run(str(folder), "-p", "the roof", *FEW)
        assert screen.getvalue() == due


def test_as_json(run, folder: Path) -> None:
    due = texts(folder, ["the roof", "cat"], temperature=0)
    code, out, err = run(str(folder), "-p", "the roof", "-p", "cat", "--temperature", "0", "--json", *FEW)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [[answer["text"] for answer in output["answers"]] for output in found["outputs"]] == due
    assert [output["prompt"] for output in found["outputs"]] == ["the roof", "cat"]
    answer = found["outputs"][0]["answers"][0]
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (12, "length")
    tokens = sum(len(answer["token_ids"]) for output in found["outputs"] for answer in output["answers"])
    assert found["tokens"] == tokens
    assert 0 < found["seconds_to_first_token"] <= found["seconds"]
    assert found["tokens_per_second"] == pytest.approx(tokens / found["seconds"])
    assert found["cache"].endswith(" = 307 kB")
    assert found["cache_bytes"] == 40 * 16 * 3 * 2 * 2 * 10 * 4


def test_the_bytes_of_a_cache_have_those_of_its_scales(run, folder: Path) -> None:
    _, out, _ = run(str(folder), "-p", "cat", "--kv-dtype", "fp8", "--json", *FEW)
    found = json.loads(out)
    assert found["cache_bytes"] == 40 * 16 * 3 * 2 * 2 * (10 + 4)
    assert found["cache"].endswith(" = 108 kB")


def test_beams_chat_and_stops(run, folder: Path) -> None:
    due = texts(folder, ["the roof"], beam_width=3, n=2)
    code, out, _ = run(str(folder), "-p", "the roof", "--beam-width", "3", "--n", "2", *FEW)
    assert (code, out) == (0, f"[1]\n{due[0][0]}\n\n[2]\n{due[0][1]}\n")

    llm = LLM(folder, max_model_len=64, num_blocks=40)
    ((due_,),) = texts(folder, [llm.tokenizer.chat([{"role": "user", "content": "the roof"}])], temperature=0)
    code, out, _ = run(str(folder), "-p", "the roof", "--chat", "--temperature", "0", *FEW)
    assert (code, out) == (0, due_ + "\n")

    middle = due_[4:6]
    code, out, _ = run(str(folder), "-p", "the roof", "--chat", "--temperature", "0", "--stop", middle, *FEW)
    assert (code, out) == (0, due_[: due_.index(middle)] + "\n")


def test_stdin_is_a_prompt(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the roof\n"))
    ((due,),) = texts(folder, ["the roof"], temperature=0)
    assert run(str(folder), "--prompt-file", "-", "--temperature", "0", *FEW)[1] == due + "\n"


@pytest.mark.parametrize(
    ("gone", "put", "words", "sentence"),
    [
        (["tokenizer.json", "tokenizer_config.json"], [], (), "{} has no tokenizer.json; text prompts need"),
        (["model.safetensors"], ["pytorch_model.bin"], (), "{} has pytorch_model.bin, a pickle, which can run any code"),
        (["config.json"], [], (), "{} has no config.json"),
        (["chat_template.jinja"], [], ("--chat",), "{} has no chat template"),
        ([], [], ("--max-model-len", "4"), "the prompt has "),
        ([], [], ("--max-model-len", "4", "-p", "b"), "prompt 1: the prompt has "),
        ([], [], ("--num-blocks", "0"), "--num-blocks is 0; must be a whole number of at least 1"),
        ([], [], ("--kv-dtype", "fp4"), "--kv-dtype is 'fp4'"),
        ([], [], ("--stop", ""), "a stop is ''; must be a string of 1 to 256 characters"),
        ([], [], ("--beam-width", "2", "--n", "3"), "--n is 3 with --beam-width 2"),
        ([], [], ("--prompt-file", "{}/model.safetensors"), "--prompt-file {}/model.safetensors is not UTF-8 text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "" if isinstance(value, list) else value[:30],
)
def test_a_users_mistake(gone, put, words, sentence: str, run, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    for name in gone:
        (copy / name).unlink()
    for name in put:
        (copy / name).touch()
    code, out, err = run(str(copy), "-p", "the roof of the house", *(word.format(copy) for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("rooftile: " + sentence.format(copy))
    assert err.count("\n") == 1


def test_an_adapter_answers(run, folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    write_adapter(tmp_path / "one", model, ("q_proj", "down_proj"), 4)
    words = (str(folder), "-p", "the roof", "--max-tokens", "9", "--temperature", "0", "--device", "cpu")
    one = f"one={tmp_path / 'one'}"
    (_, plain, _), (code, found, said) = run(*words), run(*words, "--adapter", one)
    assert code == 0, said
    due = LLM(folder, device="cpu", adapters=[one]).generate(
        "the roof", SamplingParams(temperature=0, max_tokens=9), adapter="one"
    )
    assert due[0].outputs[0].text.strip() in found
    assert found != plain
    code, _, said = run(*words, "--adapter", one, "--adapter", f"two={tmp_path / 'one'}")
    assert (code, "--adapter is given 2 times; one adapter answers all prompts here" in said) == (2, True)
