"""One table of settings: `EngineConfig`, `LLM` and the commands take the same ones, in vLLM's spelling too."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from rooftile.cli.app import app
from rooftile.cli.command import REFUSED
from rooftile.cli.vllm_flags import SERVER_REFUSED
from rooftile.engine import LLM, EngineConfig
from rooftile.engine.settings.table import SETTINGS, WEIGHT_WORDS
from rooftile.engine.vllm_names import LLM_REFUSED
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder
from rooftile.planning.formats import check_formats
from rooftile.runtime.dtypes import WORDS, dtype_word, torch_dtype
from rooftile.runtime.words import rename
from rooftile.server.settings import ServerSettings
from rooftile.weights import WEIGHT_FORMATS
from tests.engine.asking import GREEDY, ROOM, tokens_of
from tests.engine.folders import TEMPLATE, core, save
from tests.engine.test_vllm_names import LLM_NAMES

ENGINE_COMMANDS = ("serve", "generate")
COMMAND = typer.main.get_command(app)


def flags_of(command: str) -> dict[str, Any]:
    return {flag: each for each in COMMAND.commands[command].params for flag in (*each.opts, *each.secondary_opts)}


def test_the_table_is_what_an_llm_takes() -> None:
    config = {each.name: each.default for each in fields(EngineConfig)}
    assert config == {name: each.default for name, each in SETTINGS.items()}
    given = inspect.signature(LLM.__init__).parameters
    assert {name: each.default for name, each in given.items() if name not in ("self", "model")} == config
    assert set(WEIGHT_WORDS) == {*WEIGHT_FORMATS, "2:4", "auto"}


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_a_command_takes_what_an_llm_takes(command: str) -> None:
    flags = flags_of(command)
    for name, setting in SETTINGS.items():
        assert setting.flag in flags, f"{command} lacks {setting.flag}"
        if setting.vllm is not None:
            assert flags[f"--{setting.vllm.replace('_', '-')}"] is flags[setting.flag]
        if setting.kind is bool:
            assert f"--no-{name.replace('_', '-')}" in flags
    refused = {f"--{name.replace('_', '-')}" for name in REFUSED[command]}
    # an LLM serves no network, so a name for clients is the server's alone
    assert refused & flags.keys() == ({"--served-model-name"} if command == "serve" else set())
    for name in LLM_NAMES:
        # the model stands first
        if name != "model":
            assert f"--{name.replace('_', '-')}" in flags.keys() | refused, f"{command} neither takes nor answers {name}"


def ask(*words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "rooftile", *words], capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


def refusal(*words: str) -> str:
    """Returns the sentence with which a command line is refused before anything is loaded."""
    with pytest.raises((InvalidInput, Unsupported)) as raised:
        COMMAND.main([*words], standalone_mode=False)
    return str(raised.value)


@pytest.mark.parametrize(
    ("given", "due"),
    [
        ({"state_every": 0}, "state_every is 0; must be a whole number of at least 1"),
        ({"state_every": 16.0}, r"state_every is 16\.0; must be a whole number of at least 1"),
        ({"state_share": 1}, "state_share is 1; must be at least 0 and less than 1"),
        ({"state_share": -0.1}, r"state_share is -0\.1; must be at least 0 and less than 1"),
        ({"state_share": True}, "state_share is True; must be at least 0 and less than 1"),
        ({"state_share": float("nan")}, "state_share is nan; must be at least 0 and less than 1"),
        ({"state_dtype": "fp16"}, 'state_dtype is \'fp16\'; must be "fp32" or "bf16"'),
    ],
)
def test_wrong_settings_of_states(given: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{due}$"):
        EngineConfig(**given)


def test_flags_of_vllm_get_the_sentence_of_an_llm(tmp_path: Path) -> None:
    for name, (_, reason) in (LLM_REFUSED | SERVER_REFUSED).items():
        flag = f"--{name.replace('_', '-')}"
        if flag in flags_of("serve"):
            continue
        said = refusal("serve", str(tmp_path), f'{flag}={{"odd": 1}}')
        assert said.startswith(f"serve has no {flag}"), said
        flags = {each: setting.flag for each, setting in SETTINGS.items()}
        assert said.endswith(rename(reason, flags)), said
    assert refusal("generate", "x", "-q", "awq") == (
        "generate has no --quantization awq: a quantised checkpoint is read as it is; --weights quantises one in 16 bits"
    )
    assert refusal("serve", "x", "--speculative_model={}").startswith("serve has no --speculative-model {}: write --speculative=")
    assert refusal("serve", "--model", "x") == "serve has no --model x: give it first, without a flag"
    # a switch takes no word of the line
    assert refusal("serve", "--trust-remote-code", "x").startswith("serve has no --trust-remote-code: no code of a checkpoint")


def test_what_happens_anyway_may_be_asked_for_by_flags(tmp_path: Path) -> None:
    words = []
    for name, (accepted, _) in LLM_REFUSED.items():
        if not accepted:
            continue
        flag, value = name.replace("_", "-"), accepted[0]
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value != "":
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    # then the folder is refused
    assert len(words) > 40
    assert refusal("serve", str(tmp_path), *words, "-tp", "1", "--max_num_seqs", "3") == (
        f"{tmp_path} has no config.json; give the folder of a Hugging Face checkpoint"
    )


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    import transformers

    folder, tokens = tmp_path_factory.mktemp("speaker"), core("byte_level")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokens.get_vocab_size(), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return save("byte_level", folder)


def test_flags_reach_the_llm(speaker: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[LLM] = []
    init = LLM.__init__

    def keep(self: LLM, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        made.append(self)

    monkeypatch.setattr(LLM, "__init__", keep)
    template = tmp_path / "own.jinja"
    template.write_text("<|user|>{{ messages[0]['content'] }}!")
    words = (
        "--dtype torch.bfloat16 --device cpu --max-model-len 48 --block-size 8 --num-gpu-blocks-override 30 "
        "--max-num-batched-tokens 100 --gpu-memory-utilization 0.5 --kv-cache-dtype fp8_e4m3 -tp 1 --max_num_seqs 3 "
        f"--enforce-eager --no-enable-prefix-caching --deterministic --tokenizer {speaker} --chat-template {template} "
        "--no-download --generation-config none -p a --chat --max-tokens 2 --json"
    )
    found = CliRunner().invoke(
        app, ["generate", str(speaker), *words.split(), "--weights", '{"*.mlp.*": "int8"}'],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert made[0].config == EngineConfig(
        dtype=torch.bfloat16, device="cpu", max_model_len=48, block_size=8, num_blocks=30, max_batched_tokens=100,
        gpu_memory_utilization=0.5, kv_dtype="fp8", max_num_seqs=3, enforce_eager=True, enable_prefix_caching=False,
        deterministic=True, tokenizer=str(speaker), chat_template=str(template), generation_config="none",
        weights={"*.mlp.*": "int8"},
    )  # fmt: skip
    tokenizer = made[0].get_tokenizer()
    assert json.loads(found.stdout)["outputs"][0]["prompt_tokens"] == len(tokenizer.encode("<|user|>a!", special=False))


def test_a_chat_template_of_ones_own(speaker: Path, tmp_path: Path) -> None:
    file, talk = tmp_path / "own.jinja", [{"role": "user", "content": "the roof"}]
    file.write_text("{{ messages[0]['content'] }}?")
    plain = LLM(speaker, device="cpu", num_blocks=20)
    for given in (file, str(file), file.read_text()):
        llm = LLM(speaker, device="cpu", num_blocks=20, chat_template=given)
        assert llm.get_tokenizer().chat(talk) == plain.get_tokenizer().encode("the roof?", special=False)
    assert plain.get_tokenizer().chat(talk) != llm.get_tokenizer().chat(talk)
    assert LLM(speaker, device="cpu", num_blocks=20, chat_template=TEMPLATE).get_tokenizer().chat(talk) == (
        plain.get_tokenizer().chat(talk)
    )
    with pytest.raises(InvalidInput, match=r"chat_template is 'no\.jinja', which cannot be read: No such file"):
        EngineConfig(chat_template="no.jinja")
    with pytest.raises(InvalidInput, match="chat_template is 5; must be a file with a chat template, or its text"):
        EngineConfig(chat_template=5)
    with pytest.raises(InvalidInput, match="chat_template is given, and the model has no tokenizer; give a folder with one as"):
        LLM(plain.engine.runner.decoder, num_blocks=20, chat_template=TEMPLATE)


def test_words_for_dtypes_are_the_same_everywhere(peers) -> None:
    folder = peers("llama").folder
    for short, words in WORDS.items():
        dtype = getattr(torch, words[1])
        for word in (*words, *(f"torch.{each}" for each in words), dtype):
            assert (dtype_word(word), torch_dtype(word)) == (short, dtype)
            assert EngineConfig(dtype=word).dtype == dtype
            assert EngineConfig(kv_dtype=word).cache_dtype(dtype) == dtype
            assert Decoder.from_folder(folder, word, "cpu").embedding.dtype == dtype
            with pytest.raises(Unsupported, match=f"kv_dtype is '{short}' and the model computes in "):
                EngineConfig(kv_dtype=word).cache_dtype(torch.float16 if short != "fp16" else torch.float32)
    for word in (*WORDS["bf16"], "torch.bfloat16", torch.bfloat16):
        assert check_formats([word, "fp8"], backward=False, counts_losses=False) == ("bf16", "fp8")
    for bad in ("fp8", "BF17", "", None, 5, torch.int8):
        with pytest.raises(InvalidInput, match=r"^dtype is '.*'; must be one of auto, bf16 \(bfloat16\), fp16 "):
            EngineConfig(dtype=bad)
        with pytest.raises(InvalidInput, match=r"^dtype is '.*'; must be one of auto, bf16 \(bfloat16\), fp16 "):
            Decoder.from_folder(folder, bad)
    assert len(tokens_of(LLM(folder, **ROOM, kv_cache_dtype="float32"), [[1, 2]], GREEDY)) == 1
    with pytest.raises(Unsupported, match="kv_dtype is 'bf16' and the model computes in fp32; has the model's dtype, and"):
        LLM(folder, **ROOM, kv_dtype="bfloat16")


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"dtype": "fp4"}, "dtype is 'fp4'; must be one of auto"),
        ({"kv_dtype": "int3"}, "kv_dtype is 'int3'; has \"auto\""),
        ({"weights": "int3"}, "weights is 'int3'; must be one of auto, fp8"),
        ({"block_size": 12}, "block_size is 12; must be a power of two"),
        ({"approximate": "no-file"}, "approximate is 'no-file', which is no file"),
        ({"deterministic": True, "approximate": __file__}, "approximate and deterministic are both given"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size is 65; may be at most 64"),
    ],
)
def test_a_server_refuses_a_setting_before_it_listens(engine: dict[str, Any], sentence: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=f"^{sentence}"):
        ServerSettings(model="m", engine=engine)
    with pytest.raises((InvalidInput, Unsupported), match=f"^{sentence}"):
        EngineConfig(**engine)


@pytest.mark.parametrize(
    ("sentence", "due"),
    [
        ("top_k is 5 with beam_width 2; a search draws nothing", "--top-k is 5 with --beam-width 2; a search draws nothing"),
        ("n is 3 with beam_width 2", "--n is 3 with --beam-width 2"),
        ("the prompt has n tokens; seed and all", "the prompt has n tokens; seed and all"),
        ("give download=True", "give --download"),
        ('weights="w8" or weights= is', '--weights="w8" or --weights is'),
        ("deterministic is True and approximate is None", "--deterministic is True and --approximate is None"),
        ("a/max_model_len.json has 'max_model_len'", "a/max_model_len.json has 'max_model_len'"),
    ],
)
def test_sentences_name_flags(sentence: str, due: str) -> None:
    names = ("n", "seed", "top_k", "beam_width", "download", "weights", "deterministic", "approximate", "max_model_len")
    assert rename(sentence, {name: f"--{name.replace('_', '-')}" for name in names}) == due
