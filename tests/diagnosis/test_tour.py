"""The tour: predictions are the ceilings' by hand, works do what they say, and a failure is named."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from rooftile.cli.app import app
from rooftile.diagnosis.tour import calls, elementwise, guide, products
from rooftile.diagnosis.tour.exhibit import Exhibit, ExhibitCase, Expected, Lab, show
from rooftile.hardware.ceilings import Ceilings

CPU = torch.device("cpu")
CEILINGS = Ceilings(
    device="a machine", copy_gbs=10.0, matmul_tflops={"fp64": 0.05, "fp32": 0.1, "bf16": 0.2, "fp16": 0.2}, cache_gbs=100.0,
    fma_tflops=0.04, special_gops=1.0, launch_us=5.0, operator_us=6.0, node_us=None, date="",
)  # fmt: skip
LAB = Lab(CPU, CEILINGS)


@pytest.mark.parametrize(
    ("counts", "us", "bound"),
    [
        ({"bytes": 10**7}, 1000 + 5, "memory"),
        ({"bytes": 10**6, "flops": 4 * 10**7}, 1000 + 5, "compute"),
        ({"flops": 10**8, "product": "fp32"}, 1000 + 5, "compute"),
        ({"special": 10**6}, 1000 + 5, "compute"),
        ({"bytes": 10, "calls": 100}, 0.001 + 500, "overhead"),
    ],
)
def test_a_prediction_is_the_ceilings_by_hand(counts: dict, us: float, bound: str) -> None:
    assert LAB.expect(**counts) == (pytest.approx(us), bound)


def test_a_gpu_takes_the_longer_of_its_work_and_the_calls() -> None:
    lab = Lab(torch.device("cuda"), CEILINGS)
    assert lab.expect(bytes=10**7) == (pytest.approx(1000), "memory")
    assert lab.expect(bytes=10**7, calls=300) == (pytest.approx(1500), "overhead")


def test_the_knee_is_where_flat_meets_rising() -> None:
    machine = [(r, max(100.0, 8.0 * r)) for r in (1, 2, 4, 8, 16, 32, 64)]
    assert elementwise.knee_of(machine) == pytest.approx(12.5)
    assert elementwise.knee_of([(r, 100.0 + r / 100) for r in (1, 2, 4)]) is None


def test_repeats_compute_what_they_say_and_their_knee_is_the_ceilings() -> None:
    exhibit = elementwise.repeats(LAB, (1, 3), 1 << 16)
    n = (1 << 16) // 4
    # 8 bytes and 2 FLOPs per repeat for each number
    assert exhibit.cases[1].expected == (pytest.approx(max(8 * n / 10e3, 6 * n / 40e3) + 5), "memory")
    shown = show(exhibit, CPU)
    assert shown.failed == {}
    assert shown.measured_us.keys() == {"1", "3"}
    assert "The ceilings put the knee at 16 repeats" in shown.sentence
    x, y = torch.rand(64), torch.zeros(64)
    elementwise._repeated(3, x, y)()
    due = x.double()
    for _ in range(3):
        due = due * elementwise.FACTOR + elementwise.SUMMAND
    torch.testing.assert_close(y.double(), due, rtol=1e-6, atol=0)


def test_the_exhibits_do_the_work_that_they_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that are shown as several and as one have the same result, and their bytes are those of the formula."""
    monkeypatch.setitem(elementwise.LARGE, "cpu", 1 << 16)
    monkeypatch.setitem(products.SIZES, "cpu", (8, 32))
    monkeypatch.setitem(products.WIDTH, "cpu", 64)
    monkeypatch.setitem(calls.ATTENTION, "cpu", (64, 2, 16, "fp32"))
    five, one = elementwise.softmaxes(LAB).cases
    n = (1 << 15) // 4
    assert five.expected.us == pytest.approx(2 * 4 * n / 10e3 + 2 * 8 * n / 10e3 + max(8 * n / 10e3, n / 1e3) + 25)
    assert one.expected.us == pytest.approx(max(8 * n / 10e3, n / 1e3) + 5)
    largest = products.products(LAB).cases[-1]
    assert largest.expected.us == pytest.approx(max(2 * 32**3 / 0.1e6, 3 * 32 * 32 * 4 / 10e3) + 5)
    single, _ = products.decoding(LAB).cases
    assert single.expected == (pytest.approx((64 * 64 * 4 + 2 * 64 * 4) / 10e3 + 5), "overhead")
    for build in (elementwise.softmaxes, products.products, products.decoding, calls.loop, calls.attentions):
        shown = show(build(LAB), CPU)
        assert shown.failed == {}
        text = guide.predicted(shown.exhibit) + guide.measured(shown)
        assert all(text.count(case.name) >= 2 for case in shown.exhibit.cases)
        assert shown.sentence.split()[0] in text


def test_standard_attention_is_attention() -> None:
    standard, tiled = calls.attentions(LAB).cases
    out = standard.work.__closure__
    standard.work()
    held = {name: cell.cell_contents for name, cell in zip(standard.work.__code__.co_freevars, out, strict=True)}
    torch.testing.assert_close(held["out"].transpose(1, 2), tiled.work(), rtol=1e-4, atol=1e-5)


def test_a_case_that_cannot_run_is_named_with_its_reason() -> None:
    def breaks() -> None:
        raise RuntimeError("no compiler found\nsecond line")

    once = Expected(1.0, "memory")
    cases = (ExhibitCase(name="a", expected=once, work=lambda: None), ExhibitCase(name="b", expected=once, work=breaks))
    shown = show(Exhibit(title="t", does="d", cases=cases, lesson=lambda us: f"{us['b']}"), CPU)
    assert shown.sentence == "b could not run here: no compiler found"
    assert "b                                  -" in guide.measured(shown)


def test_the_command_walks_through_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "EXHIBITS", (calls.loop,))
    monkeypatch.setattr(guide, "lab_of", lambda device: Lab(device, CEILINGS))
    result = CliRunner().invoke(app, ["diagnose", "--tour", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "a machine copies 10 GB/s" in result.output
    assert result.output.index("predicted") < result.output.index("measured")
    assert "1 of 1: A Python loop of small operators" in result.output
    assert CliRunner().invoke(app, ["diagnose", "--tour", "script.py"]).exit_code != 0
