"""Kernels are compiled by threads before the first request; what they run is tests/gpu's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.engine import llm
from rooftile.engine.mixers import trial
from rooftile.engine.mixers.exact import trials as exact_trials
from rooftile.engine.mixers.native_sparse.step import SparseStep
from rooftile.engine.mixers.native_sparse.trials import SparseLayer
from rooftile.engine.mixers.recurrent.linear import LinearStep
from rooftile.engine.mixers.recurrent.step import RecurrentStep
from rooftile.engine.mixers.trial import TrialSetup
from rooftile.engine.start import blueprint, warm_up
from rooftile.engine.start import compilation as compilation_module
from rooftile.engine.start.compilation import Compilation
from rooftile.errors import InvalidInput
from rooftile.exact import paged_route as route
from rooftile.models import Decoder, ExpertSizes, ModelConfig, TrainableDecoder
from rooftile.models.checkpoints.quantised import quantise_decoder
from rooftile.models.config import config_of
from rooftile.models.layers import Layer
from rooftile.moe import Router
from rooftile.weights.files import plan
from rooftile.weights.formats import WEIGHT_FORMATS
from tests.conformance.watching import watching
from tests.kernels.recorded import recorded
from tests.models import recurrent, sparse
from tests.models.checkpoints import CONFIGS
from tests.models.quantised import quantised

pytest.importorskip("triton", reason="Triton is not installed on this platform")

PROGRAM = """
import sys
from rooftile.engine.start.warm_up import import_kernels
import_kernels()
print(*sorted(name for name in sys.modules if name.startswith("rooftile.")))
"""


def test_threads_find_all_modules_imported() -> None:
    """Two that import the same module at once may find half of it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    kernels = {
        "rooftile.exact.backends.hopper.flash_fwd.kernel", "rooftile.exact.backends.hopper.flash_fwd.launch_forward",
        "rooftile.exact.backends.hopper.decode.launch_decode", "rooftile.exact.backends.hopper.decode.bf16",
        "rooftile.exact.backends.hopper.decode.fp8", "rooftile.exact.backends.triton.paged_decode",
        "rooftile.exact.backends.triton.paged_fwd", "rooftile.kvcache.page_kernels", "rooftile.fused.kernels.norm",
        "rooftile.fused.kernels.gated", "rooftile.fused.kernels.linear", "rooftile.engine.sampling.sampling_kernels",
        "rooftile.fused.kernels.gate_quantised", "rooftile.weights.two_four.product.few_rows",
        "rooftile.weights.two_four.product.hopper", "rooftile.weights.two_four.product.transposed",
        "rooftile.weights.hopper.two_four", "rooftile.weights.hopper.ordered", "rooftile.weights.triton.launch",
        "rooftile.weights.hopper.launch", "rooftile.weights.hopper.codes", "rooftile.weights.hopper.widened",
        "rooftile.numerics.row_kernels", "rooftile.approximate.native_sparse.selected.kernels.block_choice",
        "rooftile.approximate.native_sparse.selected.kernels.outputs",
        "rooftile.approximate.native_sparse.selected.kernels.gated_sum",
        "rooftile.approximate.native_sparse.decoding_kernels.tokens", "rooftile.exact.backends.triton.flash_fwd",
    }  # fmt: skip
    assert kernels <= found


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gpt2"])
def test_all_that_is_run_for_its_kernels_runs(name: str, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain operations here; a long prompt and a short longest one."""
    config = config_of(CONFIGS[name]().to_dict(), "here")
    monkeypatch.setattr(exact_trials, "LONG_PROMPT", 200)
    monkeypatch.setattr(route, "LONG_PROMPT", 200)
    for longest, size in ((40, 16), (300, 16), (300, 8)):
        found = warm_up.jobs(config, torch.float32, torch.device("cpu"), size=size, kv_dtype=kv_dtype, longest=longest)
        masks = len(set(config.windows))
        # prompts of three lengths, or of two together and one, and a short one after much; the step in two, and of one token;
        # samples in three
        assert len(found) == masks * (4 if (longest, size, kv_dtype) == (300, 16, torch.float32) else 3) + 6
        with torch.inference_mode():
            for job in found:
                job()
    found = warm_up.jobs(
        config, torch.float32, torch.device("cpu"), size=16, kv_dtype=kv_dtype, longest=40, deterministic=True
    )  # fmt: skip
    # one kernel for all prompts and single tokens, with its chunks in one program and in several
    assert len(found) == 2 * masks + 6
    with torch.inference_mode():
        for job in found:
            job()


@pytest.mark.parametrize("mixers", [["native_sparse"] * 3, ["native_sparse", "attention", "native_sparse"]], ids=["all", "some"])
def test_layers_of_native_sparse_attention_are_run(mixers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three lengths as an engine reads them, and single tokens; exact layers only where there are any."""
    config = ModelConfig.from_folder(sparse.checkpoint(tmp_path, sparse.settings(mixers=mixers)))
    read: list[int] = []
    for name in ("_read_prompt", "_decode"):
        run = getattr(SparseStep, name)
        monkeypatch.setattr(SparseStep, name, lambda self, layer, q, *x, run=run: read.append(len(q)) or run(self, layer, q, *x))
    found = warm_up.jobs(config, torch.float32, torch.device("cpu"), size=8, kv_dtype=torch.float32, longest=100)
    exact = "attention" in mixers
    # and a token alone for each kind of layer
    assert len(found) == 2 + 4 * exact + 4 + len(set(mixers))
    with torch.inference_mode():
        for job in found:
            job()
    assert read == [100, trial.USUAL, trial.SHORT, trial.ROWS]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "bamba", "qwen3_next, dense", "olmo_hybrid"])
def test_layers_with_a_recurrence_are_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three lengths as an engine reads them, and single tokens; exact layers only where there are any."""
    config = config_of(recurrent.CONFIGS[name]().to_dict(), "here")
    read: list[int] = []
    run = RecurrentStep.__call__
    monkeypatch.setattr(
        RecurrentStep, "__call__", lambda self, layer, x, *more: read.append(len(x)) or run(self, layer, x, *more)
    )
    found = warm_up.jobs(config, torch.float32, torch.device("cpu"), size=8, kv_dtype=torch.float32, longest=100)
    hybrid = name not in ("mamba", "mamba2")
    assert len(found) == 4 + 4 * hybrid + 4 + 1 + hybrid
    with torch.inference_mode():
        for job in found:
            job()
    assert sorted(read) == sorted([100, trial.USUAL, trial.SHORT, trial.ROWS])


def test_layers_with_sums_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear attention and Performer beside exact attention: queries and keys are rotated, as in an engine's steps."""
    config = TrainableDecoder(97, hidden=32, layers=3, mixers=["linear", "attention", {"name": "performer", "m": 16}]).config
    read: list[int] = []
    run = LinearStep.__call__

    def counted(self: LinearStep, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Any) -> Tensor:
        assert rotation is not None
        read.append(len(q))
        return run(self, layer, q, k, v, rotation)

    monkeypatch.setattr(LinearStep, "__call__", counted)
    found = warm_up.jobs(config, torch.float32, torch.device("cpu"), size=8, kv_dtype=torch.float32, longest=100)
    assert len(found) == 4 + 4 + 8 + 3
    with torch.inference_mode():
        for job in found:
            job()
    assert sorted(read) == sorted([100, trial.USUAL, trial.SHORT, trial.ROWS] * 2)


def test_the_kernels_of_a_gpu_are_launched(tmp_path: Path) -> None:
    """Those of prompts, whose selected keys are read in pages, and those of single tokens."""
    said = sparse.settings(mixers=["native_sparse"] * 3, length=32, stride=16, block_size=64, count=16, window=512)
    config = ModelConfig.from_folder(sparse.checkpoint(tmp_path, said))
    assert config.native_sparse is not None
    with recorded(90) as found, torch.inference_mode():
        layer = SparseLayer(TrialSetup(config, torch.bfloat16, torch.device("cpu"), 16, torch.bfloat16, 100))
        assert layer.attention.in_place
        layer.read_prompts((100, 8))
        prompts = {one.name for one in found.values()}
        shaped = [one for one in found.values() if one.name == "_forward" and "SHAPE" in one.fn.arg_names]
        pages = [one.constants[(one.fn.arg_names.index("SHAPE"),)].PAGE for one in shaped]
        layer.decode(4)
    assert prompts >= {"_choose", "_forward", "_sum"}
    assert set(pages) == {16}
    assert {one.name for one in found.values()} >= {
        "_decode_compressed", "_score_blocks", "_keep_best", "_decode_tokens", "_merge_branches",
    }  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize("word", ["fp8", "fp8_tile", "int8", "int4:32", "nvfp4", "2:4"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_products_with_quantised_weights_are_run_for_each_tile(name: str, word: str, deterministic: bool) -> None:
    """Whatever a format leaves alone, such as rows that are no multiple of its groups, is multiplied as it is."""
    config = config_of(CONFIGS[name]().to_dict() | {"hidden_size": 64, "intermediate_size": 64}, "here")
    layer = Decoder.random(config, torch.float32, "cpu")
    quantiser = plan.quantiser_of({"*mlp*": word})
    assert quantiser is not None
    quantise_decoder(layer, quantiser)
    found = warm_up.jobs_of_products(layer.layers[0], longest=40, deterministic=deterministic)
    assert len(found) == len(warm_up.PRODUCT_ROWS)
    # the largest tile takes the compiler longest
    assert found[0].args[1] == max(warm_up.PRODUCT_ROWS)
    with torch.inference_mode():
        for job in found[-2:]:
            job()


def test_experts_are_run_up_to_the_longest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles grow with the tokens of each; one job for each number of tokens, and one set of jobs for all such layers."""
    sizes = ExpertSizes(experts=32, hidden=8, router=Router(active=1))
    config = replace(
        config_of(CONFIGS["llama"]().to_dict(), "here"), feed_forwards=("dense", "experts", "experts"), experts=sizes
    )
    dense, *layers = Decoder.random(config, torch.float32, "cpu").layers
    assert warm_up.kind_of_products(dense) == ()
    assert warm_up.kind_of_products(layers[0]) == warm_up.kind_of_products(layers[1])
    assert warm_up.kind_of_products(layers[0])[0] == sizes
    found = warm_up.jobs_of_products(layers[0], longest=8192)
    assert [job.args[1] for job in found[:3]] == [8192, 4096, 2048]
    rows: list[int] = []
    run = type(layers[0].feed_forward).compute
    monkeypatch.setattr(
        type(layers[0].feed_forward), "compute", lambda self, x, *more: rows.append(len(x)) or run(self, x, *more)
    )
    with torch.inference_mode():
        for job in found:
            job()
    # and the fewest tokens that are sorted
    assert rows == sorted({*warm_up.PRODUCT_ROWS, 5, *(2**n for n in range(14))}, reverse=True)


def test_layers_of_one_kind_are_compiled_once(peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first as soon as it has been read, and another one where a pattern gives it another format."""
    compilation = Compilation.__new__(Compilation)
    compilation._kinds, compilation._longest, compilation._lock = set(), 40, Lock()
    compilation._deterministic = False
    compilation._ready, compilation._waiting = False, []
    begun: list[Layer] = []
    monkeypatch.setattr(compilation_module, "jobs_of_products", lambda layer, **words: begun.append(layer) or [])
    weights = {"*.0.mlp.down_proj": "w8", "*.mlp.*": "int4:row"}
    decoder = Decoder.from_folder(peers("llama").folder, weights=weights, on_layer=compilation.add)
    assert begun == [decoder.layers[0], decoder.layers[1]]
    compilation.add_all(decoder)
    assert len(begun) == 2
    compilation.add_all(Decoder.from_folder(peers("llama").folder))
    assert len(begun) == 2


def test_products_of_a_checkpoint_are_run_on_the_codes_that_norms_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that leaves its product in codes has a kernel of its own, which takes codes."""
    quantised("fp8, one scale", tmp_path)
    monkeypatch.setattr("rooftile.models.projection.takes_rows", lambda x, weight, bias: True)
    with torch.inference_mode(), watching() as watch:
        warm_up._multiply(Decoder.from_folder(tmp_path).layers[0], 3, torch.nn.functional.linear)
    assert [call.name for call in watch.calls].count("linear_gated_rows") == 1


def test_rows_stand_for_all_tiles() -> None:
    from rooftile.weights.hopper import launch

    for format in WEIGHT_FORMATS:
        for deterministic in (False, True):
            for N, K in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (16384, 2048)):
                all_tiles = {launch.tile_of(M, N, K, format, deterministic) for M in range(1, launch.MOST_ROWS + 1)}
                assert all_tiles == {launch.tile_of(M, N, K, format, deterministic) for M in warm_up.PRODUCT_ROWS}
        for N, K in ((28672, 4096), (6144, 1024)):
            gated = {launch.gated_tile_of(M, N, K, format) for M in range(1, launch.MOST_ROWS + 1)}
            assert gated == {launch.gated_tile_of(M, N, K, format) for M in warm_up.PRODUCT_ROWS}


def test_who_hears_of_a_bad_folder_does_not_wait_for_kernels(peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(peers("llama").folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    begun, told, compiled = Event(), Event(), []

    def compile_slowly() -> None:
        begun.set()
        compiled.append(told.wait(300))

    monkeypatch.setattr(compilation_module, "import_kernels", compile_slowly)
    monkeypatch.setattr(blueprint, "find_device", lambda *_: torch.device("cuda", 0))
    with pytest.raises(InvalidInput, match=r"safetensors"):
        llm.LLM(folder)
    assert begun.wait(300)
    assert not compiled
    told.set()


def test_the_tables_of_the_sampler_are_there_when_its_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/kernels/test_after_warm_up.py looks for requests that compile a kernel."""
    config, seen = config_of(CONFIGS["llama"]().to_dict(), "here"), []

    def noted(logits, slots, positions, state, features):
        given = {"penalties": state.counts, "bias": state.bias, "mask": state.masks}
        assert all(table is not None for name, table in given.items() if getattr(features, name))
        seen.append(features)

    monkeypatch.setattr(warm_up, "sample", noted)
    for job in warm_up.jobs(config, torch.float32, torch.device("cpu"), size=16, kv_dtype=torch.float32, longest=40):
        job()
    assert seen == [*warm_up.FEATURES, *warm_up.RARER]
    assert {(one.truncation, one.changes_logits) for one in seen} == {(False, False), (True, False), (True, True)}
