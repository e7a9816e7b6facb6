"""A command refuses a wrong path or word before torch is imported, and names the flag."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib, io, json, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise SystemError("torch is imported")

sys.meta_path.insert(0, Refuses())
from rooftile.cli import main

found = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main(words)
    except SystemExit as left:
        found.append([left.code, said.getvalue()])
    except SystemError as error:
        found.append([None, str(error)])
print(json.dumps(found))
"""
NOWHERE = "nowhere is not a folder; give one with config.json"
WORD = "--dtype is 'fp4'; must be one of "


def test_a_wrong_path_or_word_is_refused_without_torch(tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text"
    model.mkdir()
    (model / "config.json").write_text("{}")
    text.write_text("a roof")
    M, T = str(model), str(text)
    cases = [
        (("generate", "nowhere", "-p", "a"), NOWHERE),
        (("generate", M, "--prompt-file", "none"), "--prompt-file none cannot be read: No such file"),
        (("generate", M, "-p", "a", "--tokenizer", "none"), "--tokenizer is 'none', which is not a folder"),
        (("generate", M, "-p", "a", "--approximate", "none"), "--approximate is 'none', which is no file"),
        (("generate", M, "-p", "a", "--dtype", "fp4"), WORD),
        (("generate", M, "-p", "a", "--top-p", "2"), "--top-p is 2.0; must be"),
        (("serve", "nowhere"), NOWHERE),
        (("serve", M, "--dtype", "fp4"), WORD),
        (("serve", M, "--kv-cache-dtype", "fp4"), "--kv-dtype is 'fp4'; has"),
        (("serve", M, "--weights", "int5"), "--weights is 'int5'; must be one of"),
        (("serve", M, "--weights", "{a"), "--weights is '{a', which is no JSON"),
        (("serve", M, "--chat-template", "none"), "--chat-template is 'none', which cannot be read: No such file"),
        (("serve", M, "--api-key-file", "none"), "--api-key-file none cannot be read: No such file"),
        (("serve", M, "--api-key", "short"), "--api-key is too short; must have at least 16 characters"),
        (("serve", M, "--device", "tpu"), "--device is 'tpu'; must be cpu, cuda or cuda:N"),
        (("serve", M, "--allowed-origins", "a.example"), "--allowed-origins has 'a.example'; must be *, or origins such as"),
        (("calibrate", "nowhere", "--text", T), NOWHERE),
        (("calibrate", M, "--text", "none"), "--text none cannot be read: No such file"),
        (("calibrate", M, "--text", T, "--dtype", "fp4"), WORD),
        (("accuracy", "nowhere", "--data", T), NOWHERE),
        (("accuracy", M, "--data", "none"), "--data is none, which is no file"),
        (("accuracy", "--tensors", "none"), "--tensors is none, which is no file"),
        (("accuracy", "--dtype", "fp4"), WORD),
        (("plan", "nowhere"), NOWHERE),
        (("plan", M, "--data", "none"), "--data none cannot be read: No such file"),
        (("quantise", "nowhere", "out"), NOWHERE),
        (("diagnose", "none.py"), "none.py is not a file; give the path of a Python script"),
        (("diagnose", "--checkpoint", "nowhere"), NOWHERE),
        (("bench", "compare", "none"), "none does not exist; `rooftile bench attention --json none` writes"),
        (("bench", "serving", "--model", "nowhere"), "--model is 'nowhere', which is no folder; has tiny, 0.6b, 1b, 8b"),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps([words for words, _ in cases]), capture_output=True, text=True,
        check=True, timeout=120,
    )  # fmt: skip
    for (words, due), (code, said) in zip(cases, json.loads(ran.stdout), strict=True):
        assert (code, said.startswith(f"rooftile: {due}"), said.count("\n")) == (2, True, 1), (words, said)


def test_the_names_of_models_are_those_of_the_bench() -> None:
    from rooftile_lab.bench.models import MODELS
    from rooftile_lab.cli.bench_serving import MODELS as NAMES

    assert tuple(MODELS) == NAMES
