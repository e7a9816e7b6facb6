"""All shown code runs: every Python fence, every example, and the examples in the public docstrings."""

from __future__ import annotations

import doctest

import pytest
import torch

import rooftile
import rooftile.integrations.transformers
import rooftile.models
import rooftile.nn
from rooftile import moe
from rooftile.integrations import flash_attn
from tests.docs.pages import NAMES, ROOT, printed_errors, program, run_script

WITH_CODE = [name for name in NAMES if program(ROOT / name)]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# arguments that make an example short, where it takes long without them
SHORT = {
    "train_hstu.py": ("--steps", "15", "--users", "100"),
    "score_candidates.py": ("--steps", "5", "--users", "100"),
}
DOCUMENTED = {
    name: thing
    for module, names in (
        (rooftile, rooftile.__all__),
        (rooftile.nn, ["Attention", "DeepSeekMoE"]),
        (moe, moe.__all__),
        (rooftile.models, ["TrainableDecoder"]),
        (flash_attn, flash_attn.__all__),
    )
    for name in names
    if ">>>" in (thing := getattr(module, name)).__doc__
}


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_fences_of_a_page_run_in_order(name, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(program(ROOT / name), encoding="utf-8")
    code, _, errors = run_script(script, tmp_path)
    assert code == 0, f"{name} (line numbers are the page's):\n{errors}"


def test_each_error_that_a_page_prints_stands_beside_it():
    """`program` compares them, so that no page shows a sentence of an earlier version."""
    found = {name: printed_errors(ROOT / name) for name in WITH_CODE}
    assert sum(map(len, found.values())) >= 6
    assert [name for name, errors in found.items() if not all(sentence for _, sentence in errors)] == []


def test_a_wrong_sentence_and_a_missing_error_fail_a_page(tmp_path):
    for code, part in (
        ("try:\n    raise ValueError('a; b')\nexcept ValueError as error:\n    print(error)  # a; c\n", "AssertionError: a; b"),
        ("try:\n    pass\nexcept ValueError as error:\n    print(error)  # a\n", "some did not come"),
        ("try:\n    raise ValueError('a; b')\nexcept ValueError as error:\n    print(error)  # a; ...\n", ""),
    ):
        page, script = tmp_path / "page.md", tmp_path / "page.py"
        page.write_text(f"# A page\n\n```python\n{code}```\n", encoding="utf-8")
        script.write_text(program(page), encoding="utf-8")
        exit_code, _, errors = run_script(script, tmp_path)
        assert (exit_code == 0) == (part == "")
        assert part in errors


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_says_something(name, tmp_path):
    code, output, errors = run_script(ROOT / "examples" / name, tmp_path, *SHORT.get(name, ()))
    assert code == 0, errors
    assert output.strip()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_docstring_example_runs(name, monkeypatch):
    # the example prints the same lines with a budget of a second; the default of a minute would only cost time
    monkeypatch.setitem(rooftile.diagnose.__kwdefaults__, "budget", 1.0)
    # an example ends with `disable`, which other tests of this process must not find
    monkeypatch.setattr(rooftile.integrations.transformers, "_disabled", False)
    q, k, v = (torch.randn(1, 16, 2, 32) for _ in range(3))
    scope = {"torch": torch, "rooftile": rooftile, "q": q, "k": k, "v": v}
    scope |= {public: getattr(rooftile, public) for public in rooftile.__all__} | DOCUMENTED
    for example in doctest.DocTestParser().get_examples(DOCUMENTED[name].__doc__):
        if example.options.get(doctest.SKIP):
            # it needs something that tests do not have, such as a checkpoint
            continue
        if example.want:
            assert repr(eval(example.source, scope)) == example.want.strip()
        else:
            exec(example.source, scope)


def test_the_readme_shows_python_before_its_fifteenth_line():
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:14]
    assert "```python" in first
