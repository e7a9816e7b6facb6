"""`rooftile calibrate`: the file is that of `calibrate` on the tokenizer's tokens, and what is wrong is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from rooftile.approximate import LokiLayers
from rooftile.cli import main
from rooftile.engine import LLM, SamplingParams
from rooftile.engine.mixers.loki.calibration import calibrate
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.models import Decoder
from tests.engine.folders import CORPUS, save
from tests.models.checkpoints import SMALL, saved

TEXT = "\n".join(CORPUS * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420, "eos_token_id": 419})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    return save("byte_level", path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a command line in an empty folder with the text; returns its exit code, stdout and stderr."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        out = capsys.readouterr()
        return int(left.value.code or 0), out.out, out.err

    return call


def test_the_file_is_what_the_function_fits_and_an_engine_reads(run, folder: Path) -> None:
    words = ("--text", "text.txt", "--dims", "0.4", "--keep", "0.5", "--length", "50", "--device", "cpu")
    code, out, err = run("calibrate", str(folder), *words)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == (
        f'loki.pt has LokiLayers(3 layers, 2 heads of 10, dims=0.4, keep=0.5); use it with LLM("{folder}", approximate="loki.pt")'
    )
    found = LokiLayers.load("loki.pt")
    tokens = Tokenizer.from_folder(folder).encode(TEXT)
    due = calibrate(Decoder.from_folder(folder, device="cpu"), tokens, dims=0.4, keep=0.5, length=50)
    assert all(torch.equal(one.p, other.p) for one, other in zip(found.layers, due.layers, strict=True))
    llm = LLM(folder, approximate="loki.pt", max_model_len=64, num_blocks=40)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    text = llm.generate("the roof is tiled, and a tile", greedy)[0].outputs[0].text
    short = ("--device", "cpu", "--max-model-len", "64", "--num-blocks", "40", "--max-tokens", "12", "--temperature", "0")
    asked = ("generate", str(folder), "-p", "the roof is tiled, and a tile", "--approximate", "loki.pt", *short)
    assert run(*asked)[:2] == (0, text + "\n")


def test_json_says_how_much_variance_the_leading_dimensions_have(run, folder: Path) -> None:
    shares = {}
    for dims in ("0.2", "1"):
        code, out, _ = run("calibrate", str(folder), "--text", "text.txt", "--dims", dims, "--out", "a.pt", "--json")
        assert code == 0
        told = json.loads(out)
        assert (told["layers"], told["leading"], told["file"]) == (3, round(10 * float(dims)), "a.pt")
        shares[dims] = told["variance"]
    assert shares["1"] == pytest.approx([1, 1, 1])
    assert all(0.2 < share < 1 for share in shares["0.2"])


@pytest.mark.parametrize(
    ("words", "due"),
    [
        (("--text", "missing.txt"), "--text missing.txt cannot be read: No such file or directory"),
        (("--text", "binary.txt"), "--text binary.txt is not UTF-8 text: invalid start byte at byte 0"),
        (("--text", "short.txt"), "the text has 2 tokens; must have at least 10"),
        (("--text", "text.txt", "--dims", "0"), "--dims is 0.0; must be above 0 and at most 1"),
        (("--text", "text.txt", "--keep", "1.5"), "--keep is 1.5; must be above 0 and at most 1"),
        (("--text", "text.txt", "--dtype", "fp8"), "--dtype is 'fp8'; must be one of auto, bf16 (bfloat16), fp16"),
        (("--text", "text.txt", "--out", "no/where.pt"), "--out is no/where.pt, where no file can be written"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], due: str, run, folder: Path) -> None:
    Path("binary.txt").write_bytes(b"\xff\xfe")
    Path("short.txt").write_text("a")
    code, out, err = run("calibrate", str(folder), *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"rooftile: {due}")
    assert len(err.splitlines()) == 1
    assert not Path("loki.pt").exists()


def test_a_folder_without_a_model_is_one_sentence(run, tmp_path: Path) -> None:
    code, _, err = run("calibrate", str(tmp_path / "nothing"), "--text", "text.txt")
    assert code == 2
    assert len(err.splitlines()) == 1
