"""The datasheet table, the description of this machine, and the measured ceilings with their cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rooftile import InvalidInput
from rooftile.hardware import ceilings, rates
from rooftile.hardware.chips import CHIPS, chip_named
from rooftile.hardware.device import describe, device_of

NAMES = {
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A10G": "A10G",
    "NVIDIA A10": "A10",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
}


@pytest.mark.parametrize(("reported", "row"), NAMES.items())
def test_a_gpu_is_found_by_the_name_that_its_driver_gives(reported: str, row: str) -> None:
    found = chip_named(reported)
    assert found is not None
    assert found.name == row


def test_an_unknown_chip_has_no_row() -> None:
    assert chip_named("Intel(R) Xeon(R) Processor") is None
    assert chip_named("NVIDIA L40") is None


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_each_row_is_a_plausible_dense_machine(chip) -> None:
    rates = chip.rates("fp32")
    assert rates.bytes_per_s == chip.bandwidth_gbs * 1e9
    # a ridge outside this range means a wrong unit, or a rate for sparse operands
    assert 1 < rates.flops_per_s / rates.bytes_per_s < 120
    if chip.bf16_tflops is not None:
        assert 30 < chip.bf16_tflops * 1e3 / chip.bandwidth_gbs < 450
    if chip.fp8_tflops is not None:
        assert chip.fp8_tflops == pytest.approx(2 * chip.bf16_tflops, rel=0.02)


def test_a_rate_that_a_chip_lacks_is_refused_in_words() -> None:
    with pytest.raises(InvalidInput, match="A100 80GB SXM has no datasheet rate for 'fp8'"):
        chip_named("NVIDIA A100-SXM4-80GB").rates("fp8")


def test_this_machine_is_described_in_plain_values() -> None:
    here = describe("cpu")
    assert (here.type, here.arch, here.torch) == ("cpu", "cpu", torch.__version__)
    assert here.cores >= 1
    assert here.memory_bytes > 1 << 28
    assert json.loads(json.dumps(here.json()))["name"] == here.name


def test_a_device_word_is_a_device_or_a_sentence() -> None:
    assert device_of("cpu") == torch.device("cpu")
    assert device_of("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(InvalidInput, match="device is 'tpu'; must be cpu, cuda or cuda:N"):
        device_of("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="torch finds no CUDA device here; use cpu"):
        device_of("cuda")


MADE = ceilings.Ceilings(
    device="d", copy_gbs=3.0, matmul_tflops={"fp32": 1.0}, cache_gbs=20.0, fma_tflops=1.0, special_gops=1.0, launch_us=1.0,
    operator_us=1.0, node_us=None, date="2026-01-01",
)  # fmt: skip


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceilings, "_MEASURED", {})
    return tmp_path / "rooftile"


def test_the_ceilings_of_this_machine_are_those_of_a_computer(empty_cache: Path) -> None:
    found = ceilings.measure("cpu")
    assert 0.5 < found.copy_gbs < 2000
    assert set(found.matmul_tflops) == {"fp64", "fp32", "bf16", "fp16"}
    assert 0.0005 < found.matmul_tflops["fp32"] < 50
    assert found.rates("fp32").flops_per_s == found.matmul_tflops["fp32"] * 1e12
    assert found.kind == "measured"
    # caches are nearer than memory, and a core computes an exponential in 0.05 to 100 ns
    assert found.cache_gbs > 0.5 * found.copy_gbs
    assert found.fma_tflops == found.matmul_tflops["fp32"]
    assert 0.01 < found.special_gops < 20 * torch.get_num_threads()
    assert 0.1 < found.operator_us < 1000
    assert found.node_us is None
    assert torch.get_float32_matmul_precision() == "highest"


def test_int8_is_a_ceiling_of_gpus_alone() -> None:
    """A CPU multiplies INT8 by its definition, in fp32."""
    assert not rates.has_int8(torch.device("cpu"))
    with pytest.raises(InvalidInput, match="no ceiling was measured for 'int8' here; has fp32"):
        MADE.rates("int8")
    assert replace(MADE, matmul_tflops={"int8": 2.0}).rates("int8").flops_per_s == 2e12


def test_a_machine_that_got_int8_is_measured_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stored ceilings are of a version that did not measure it."""
    monkeypatch.setattr(ceilings, "_measure", lambda device, say: MADE)
    ceilings.measure("cpu")
    monkeypatch.setattr(rates, "has_int8", lambda device: True)
    monkeypatch.setattr(ceilings, "_measure", lambda device, say: replace(MADE, matmul_tflops={"int8": 2.0}))
    assert ceilings.measure("cpu").rates("int8").flops_per_s == 2e12


def test_ceilings_are_measured_once_and_again_on_refresh(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def pretend(device: torch.device, say: object) -> ceilings.Ceilings:
        nonlocal count
        count += 1
        return replace(MADE, copy_gbs=float(count))

    monkeypatch.setattr(ceilings, "_measure", pretend)
    assert ceilings.measure("cpu").copy_gbs == 1.0
    assert ceilings.measure("cpu").copy_gbs == 1.0
    # another process finds the file
    monkeypatch.setattr(ceilings, "_MEASURED", {})
    assert ceilings.measure("cpu").copy_gbs == 1.0
    assert ceilings.measure("cpu", refresh=True).copy_gbs == 2.0
    assert ceilings.measure("cpu").copy_gbs == 2.0
    # the higher of two measurements is kept, in the file too
    assert ceilings.measure_again("cpu").copy_gbs == 3.0
    monkeypatch.setattr(ceilings, "_measure", lambda device, say: replace(MADE, copy_gbs=2.0))
    assert ceilings.measure_again("cpu").copy_gbs == 3.0
    ceilings._MEASURED.clear()
    assert ceilings.measure("cpu").copy_gbs == 3.0
    assert [path.suffix for path in empty_cache.iterdir()] == [".json"]


def test_ceilings_that_cannot_be_kept_are_still_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rooftile").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceilings, "_MEASURED", {})
    made = replace(MADE, matmul_tflops={})
    monkeypatch.setattr(ceilings, "_measure", lambda device, say: made)
    with pytest.warns(UserWarning, match="could not store"):
        assert ceilings.measure("cpu") == made


def test_of_two_measurements_the_higher_rates_and_the_shorter_times_count() -> None:
    busy = replace(MADE, cache_gbs=10.0, special_gops=0.5, operator_us=3.0, matmul_tflops={"fp32": 0.5})
    assert ceilings.higher(busy, MADE) == ceilings.higher(MADE, busy) == MADE
    assert ceilings.higher(replace(MADE, node_us=2.0), replace(MADE, node_us=1.0)).node_us == 1.0


def test_a_dtype_without_a_measured_ceiling_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="no ceiling was measured for 'fp64' here; has fp32"):
        MADE.rates("fp64")
