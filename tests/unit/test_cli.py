"""The command line: what it prints, what it refuses, and that it is silent when piped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rooftile
from rooftile.cli import main
from rooftile.cost import session
from rooftile.hardware import ceilings
from rooftile_lab.bench import results
from rooftile_lab.cli.bench import COMMANDS as BENCHES

CEILINGS = ceilings.Ceilings(
    device="d", copy_gbs=10.0, matmul_tflops={"fp32": 0.1, "bf16": 0.1, "fp16": 0.1}, cache_gbs=20.0, fma_tflops=0.1,
    special_gops=1.0, launch_us=1.0, operator_us=1.0, node_us=None, date="2026-01-01",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceilings, "_MEASURED", {})
    monkeypatch.setattr(ceilings, "_measure", lambda device, say: CEILINGS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Runs a command line; returns its exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        out = capsys.readouterr()
        return int(left.value.code or 0), out.out, out.err

    return call


COMMANDS = [
    ("doctor",), ("explain",), ("mask",), ("warmup",), ("generate",), ("calibrate",), ("report",),
    *(("bench", name) for name in BENCHES),
]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(run, words: tuple[str, ...]) -> None:
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert f"Example: rooftile {' '.join(words)}" in " ".join(out.split())
    assert "--json" in out
    assert ("--device" in out) == (words not in (("bench", "compare"), ("mask",)))


@pytest.mark.parametrize("words", [(), ("bench",)], ids=["rooftile", "bench"])
def test_the_list_of_commands_has_whole_sentences(run, words: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*words, "--help")
    assert code == 0
    listed = out.partition("Commands:")[2]
    assert listed.count("\n  ") > 5
    assert "..." not in listed


def test_the_version_and_completion(run) -> None:
    assert run("--version") == (0, f"rooftile {rooftile.__version__}\n", "")
    assert "--install-completion" in run("--help")[1]


def test_a_mask_is_drawn(run) -> None:
    code, out, err = run("mask", "CAUSAL & Window(1)", "--queries", "3", "--keys", "4")
    assert (code, err) == (0, "")
    assert out == "CAUSAL & Window(1): 6 of 12 pairs are visible\n##..\n.##.\n..##\n"
    code, out, _ = run("mask", "Window(None, 2) & Chunk(4)", "--json")
    assert (code, json.loads(out)["mask"]) == (0, "Window(None, 2) & Chunk(4)")


def test_a_report_is_not_written_into_a_file(run, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("not a folder")
    code, out, err = run("report", "--device", "cpu", "--quick", "--out", str(tmp_path / "page" / "deep" / "index.html"))
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'page'} is a file; give a file in a folder" in err


def test_doctor_as_json_says_what_is_here(run) -> None:
    code, out, err = run("doctor", "--device", "cpu", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["machine"]["torch"] == torch.__version__
    assert found["measured"]["memory_gbs"] == 10.0
    assert found["backends"]["eager"] == {"problem": found["backends"]["tiled"]["problem"], "runs": True, "reasons": []}
    assert found["backends"]["triton"]["reasons"]


def test_doctor_as_text_names_each_backend_and_the_caches(run) -> None:
    code, out, err = run("doctor", "--device", "cpu")
    assert (code, err) == (0, "")
    for word in ("Ceilings", "fp32 matmul, TFLOP/s", "tiled    runs", "triton   no: tensors are on cpu", "stored in"):
        assert word in out


def test_bench_attention_prints_a_table_and_appends_lines(run, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = (
        "bench",
        "attention",
        "--device",
        "cpu",
        "--case",
        "causal",
        "--backend",
        "eager",
        "--peers",
        "flex,standard",
    )
    code, out, err = run(*words, "--rounds", "1", "--json", str(file))
    assert code == 0
    assert err.splitlines()[:2] == ["measuring the ceilings", "case 1 of 1, causal: the definition"]
    assert [(row.backend, row.phase) for row in results.read(file)] == [
        (name, phase) for name in ("eager", "flex", "standard") for phase in ("fwd", "bwd")
    ]
    lines = out.splitlines()
    assert sum(line.startswith("causal ") for line in lines) == 4
    assert "Ceilings of this run: copy 10 GB/s" in out
    assert "flex: refused: tensors are on cpu" in out


def test_bench_attention_prints_json_lines_on_stdout(run) -> None:
    words = ("bench", "attention", "--device", "cpu", "--case", "one-by-one", "--backend", "eager", "--peers", "")
    code, out, _ = run(*words, "--phase", "fwd", "--rounds", "1", "--json", "-")
    (line,) = out.splitlines()
    assert code == 0
    assert json.loads(line)["commit"] == session.commit()


def test_bench_serving_prints_tables_and_appends_lines(run, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = ("bench", "serving", "--device", "cpu", "--workload", "W8", "--workload", "W10", "--scale", "0.02", "--runs", "1")
    code, out, _ = run(*words, "--json", str(file))
    assert code == 0
    rows = results.read(file)
    assert [(row.case, row.backend) for row in rows] == [
        ("W8-tiny-x0.02", "rooftile, contiguous"), ("W8-tiny-x0.02", "rooftile, paged"), ("W10-tiny-x0.02", "rooftile, paged")
    ]  # fmt: skip
    assert {(row.settings["model"], row.settings["scale"], row.samples) for row in rows} == {("tiny", 0.02, 1)}
    for word in ("out tok/s", "waste %", "% floor", "TTFT", "E2E per token", "paged over contiguous: requests_per_step"):
        assert word in out


def test_bench_serving_hands_its_options_to_the_engine(run) -> None:
    words = ("bench", "serving", "--device", "cpu", "--workload", "W3", "--scale", "0.01", "--runs", "1", "--rate", "1000")
    more = ("--allocator", "contiguous", "--num-blocks", "64", "--block-size", "8", "--max-num-seqs", "2", "--kv-dtype", "fp8")
    more += ("--weights", "int4:32")
    code, out, _ = run(*words, *more, "--json", "-")
    (line,) = out.splitlines()
    row = json.loads(line)
    assert (code, row["case"], row["backend"]) == (0, "W3@1000-tiny-int4:32-weights-fp8-cache-x0.01", "rooftile, contiguous")
    assert row["settings"] | {"num_blocks": 64, "block_size": 8, "max_num_seqs": 2, "kv_dtype": "fp8"} == row["settings"]
    assert row["settings"]["weights"] == "int4:32"
    assert row["measures"]["running"] <= 2


def test_bench_list_knows_cases_and_providers(run) -> None:
    code, out, _ = run("bench", "list", "--tag", "cpu-bench", "--device", "cpu", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["cases"][0]["case"] == "cpu-full-256"
    assert found["providers"]["eager"] == "runs"
    assert "cpu" in found["providers"]["flex"]


def test_bench_compare_states_the_bar(run, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    shared = {
        "suite": "", "case": "c", "ran": "", "phase": "fwd", "problem": "", "device": "", "arch": "", "driver": "", "torch": "",
        "triton": "", "commit": "", "date": "", "copy_gbs": 1.0, "matmul_tflops": 1.0,
    }  # fmt: skip
    rows = [results.Row(backend=name, median_us=us, **shared) for name, us in (("a", 10.0), ("b", 15.0))]
    results.append(file, [row.json() for row in rows])
    code, out, _ = run("bench", "compare", str(file), "--backend", "a", "--peer", "b")
    assert (code, out) == (0, "fwd: a is 1.50x b over 1 cases (worst 1.50x at c, best 1.50x at c)\n")


def test_explain_gives_backends_and_costs(run) -> None:
    code, out, _ = run("explain", "--case", "causal", "--device", "cpu", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["backends"]["eager"] == []
    assert found["cost"]["fwd"]["flops"] == 4 * 2 * 2 * (128 * 129 // 2) * 64


def test_warmup_runs_each_case_once(run) -> None:
    code, out, _ = run("warmup", "--case", "causal", "--case", "packed", "--device", "cpu", "--json")
    assert code == 0
    assert list(json.loads(out)) == ["causal", "packed"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("mask", "CAUSAL & Nope(3)"),
            "the mask is 'CAUSAL & Nope(3)'; must be FULL, CAUSAL, Window(n), Prefix(n), Chunk(n) or Targets(n)",
        ),
        (("mask", "__import__('os')"), """the mask is "__import__('os')"; must be FULL"""),
        (("mask", "Window(-1)"), "Window: left is -1; must be an integer of at least 0"),
        (("mask", "Window"), "the mask is 'Window'; must be FULL"),
        (("explain", "--case", "nope"), "no case is named 'nope'; `rooftile bench list` prints all cases"),
        (("bench", "attention", "--tag", "nope"), "no case has the tag 'nope'; has conformance, cpu-bench"),
        (
            ("bench", "attention", "--case", "mha", "--backend", "nope"),
            "no backend or peer is called 'nope'; has rooftile",
        ),
        (("bench", "attention", "--case", "mha", "--phase", "both"), "--phase is 'both'; must be fwd or bwd"),
        (("bench", "attention", "--case", "mha", "--rounds", "0"), "--rounds is 0; must be at least 1"),
        (("bench", "attention", "--backend", "", "--peers", ""), "bench got nothing to time"),
        (("bench", "serving", "--workload", "W12"), "no workload is called 'W12'; has W1, W2, W3"),
        (("bench", "engine", "--case", "nope"), "bench engine has no case 'nope'; has start, W1, W10"),
        (("bench", "overhead", "--case", "nope"), "bench overhead has no case 'nope'; has host, d64-causal-512"),
        (("bench", "serving", "--model", "nope"), "--model is 'nope', which is no folder; has tiny, 0.6b, 1b, 8b"),
        (("bench", "compare", "no-such-file.jsonl"), "no-such-file.jsonl does not exist"),
        (("bench", "tiles", "--device", "cpu"), "bench tiles measures a GPU, and the device is cpu; give --device"),
        (("bench", "tiles", "--rows", "1,a"), "--rows is '1,a'; give whole numbers by commas, such as 1,16,64"),
        (("bench", "cusparselt", "--rows", ""), "--rows is ''; give whole numbers by commas"),
        (("bench", "native-sparse", "--heads", "6,4"), "--heads is '6,4'; give query heads and key heads that divide them"),
        (("bench", "ladder", "--device", "cpu"), "bench ladder measures a GPU, and the device is cpu; give --device"),
        (("bench", "server", "--case", "nope"), "bench server has no case 'nope'; has throughput, first-token, lag"),
        (("bench", "server", "--model", "0.6b", "--device", "cpu"), "--model is '0.6b'; bench server has tiny, 1b, 8b"),
        (("doctor", "--device", "tpu"), "--device is 'tpu'; must be cpu, cuda or cuda:N"),
        (("warmup",), "warmup got no case; name some with --case or --tag"),
        (("generate", "folder"), "generate got no prompt; give one with -p or --prompt-file"),
        (("generate", "no-such-folder", "-p", "a"), "no-such-folder is not a folder; give one with config.json and"),
        (("generate", "folder", "-p", "a", "--temperature", "-1"), "--temperature is -1.0; must be a finite number"),
        (("generate", "folder", "-p", "a", "--beam-width", "2", "--top-k", "5"), "--top-k is 5 with --beam-width 2; a"),
        (("generate", "folder", "-p", "a", "--dtype", "fp4"), "--dtype is 'fp4'; must be one of auto, bf16 (bfloat16), fp16"),
        (("generate", "folder", "--prompt-file", "no-such-file"), "--prompt-file no-such-file cannot be read: No such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(run, words: tuple[str, ...], sentence: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    *progress, last = err.splitlines()
    assert last.startswith(f"rooftile: {sentence}")
    assert not any(line.startswith("rooftile: ") for line in progress)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_cuda_is_one_sentence_and_exit_code_2(run) -> None:
    code, _, err = run("bench", "attention", "--device", "cuda")
    assert code == 2
    assert err.startswith("rooftile: --device is 'cuda', and torch finds no CUDA device here; use cpu")


def test_the_module_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "rooftile", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in ran.stdout
    assert ran.stderr == ""


def test_no_help_waits_for_torch_or_a_server() -> None:
    """Modules are counted and not seconds: importing torch takes some, and so does a server."""
    program = """
import contextlib, io, sys
from rooftile.cli import main
from rooftile.cli.app import COMMANDS
from rooftile_lab.cli.bench import COMMANDS as SUITES

shown = 0
for words in [[], ["bench"], *([name] for name in COMMANDS), *(["bench", name] for name in SUITES)]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    shown += "Usage: rooftile" in out.getvalue()
roots = {name.split(".")[0] for name in sys.modules}
print(shown - len(COMMANDS) - len(SUITES), sorted(roots & {"torch", "numpy", "triton", "transformers", "fastapi", "msgspec"}))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "2 []"


def test_importing_rooftile_imports_no_command_line() -> None:
    program = "import sys, rooftile; print([name for name in ('typer', 'rich', 'click') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_dir_has_what_is_public_and_nothing_else() -> None:
    assert dir(rooftile) == sorted([*rooftile.__all__, "__version__"])
    assert all(hasattr(rooftile, name) for name in dir(rooftile))
