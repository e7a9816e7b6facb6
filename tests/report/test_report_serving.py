"""The serving section: numbers and pictures match the block tables, these match the pool, and answers match Transformers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from rooftile_lab.bench.threads import one_thread
from rooftile_lab.report import block_map, claims, experiments, machine, page, serving, training
from rooftile_lab.report.block_tables import BLOCK, Frame, Recorder, Table
from rooftile_lab.report.plan import plan_for
from rooftile_lab.report.progress import Progress
from rooftile_lab.report.serving import Served, Serving

PLAN = plan_for("cpu", quick=True)
KINDS = ("room", "filled", "shared")
SVG = "{http://www.w3.org/2000/svg}"


class Witness(Recorder):
    """Also records the pool's own numbers in each step."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.owners: list[dict[int, int]] = []
        witnesses.append(self)

    def run(self, plan: Any) -> Any:
        result = super().run(plan)
        pool = self._engine.pool
        pool.check()
        self.owners.append({block: count for block, count in enumerate(pool._owners) if count})
        return result


witnesses: list[Witness] = []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Writes a checkpoint like that of the training, with the initial weights."""
    made = tmp_path_factory.mktemp("checkpoint")
    with training.quiet():
        training.llama(PLAN.model).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def found(folder) -> Serving:
    """Runs the quick plan."""
    witnesses.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "Recorder", Witness)
        return serving.serve(PLAN.serving, folder, "cpu", lambda done, doing: None)


@pytest.fixture(params=["contiguous", "paged"])
def served(request, found) -> Served:
    return getattr(found, request.param)


def test_every_step_has_the_blocks_and_owners_that_the_pool_has(found):
    for witness, side in zip(witnesses, (found.contiguous, found.paged), strict=True):
        assert len(witness.owners) == side.steps
        for owners, frame in zip(witness.owners, side.frames, strict=True):
            assert Counter(block for table in frame.tables for block in table.blocks) == owners
            assert {block: cell.tables for block, cell in frame.cells().items()} == owners


def test_numbers_agree_with_a_count_from_the_tables(served):
    wastes, saved = [], []
    for frame in served.frames:
        slots = {(block, slot): False for table in frame.tables for block in table.blocks for slot in range(BLOCK)}
        for table in frame.tables:
            for n in range(table.length):
                slots[table.blocks[n // BLOCK], n % BLOCK] = True
        wastes.append(list(slots.values()).count(False) / len(slots))
        saved.append(1 - len(slots) / BLOCK / sum(len(table.blocks) for table in frame.tables))
        assert sum(cell.filled for cell in frame.cells().values()) == sum(slots.values())
    assert served.waste == pytest.approx(sum(wastes) / len(wastes))
    assert served.saved == pytest.approx(sum(saved) / len(saved))
    assert served.running == pytest.approx(sum(len(frame.tables) for frame in served.frames) / served.steps)


def test_a_shared_block_is_as_full_as_its_longest_table_has_it():
    frame = Frame((Table(3, 0, (7, 5), BLOCK + 9), Table(4, 0, (7, 5), BLOCK + 2), Table(4, 1, (8,), 1)), waste=0.0, saved=0.0)
    assert frame.cells() == {7: (3, 2, BLOCK), 5: (3, 2, 9), 8: (4, 1, 1)}


def test_every_request_is_answered_in_full(found):
    asks = serving.requests(PLAN.serving, bytes(training.corpus().tolist()))
    assert {ask.params.n for ask in asks} == {1, PLAN.serving.samples}
    due = sum(ask.params.n * ask.params.max_tokens for ask in asks)
    assert found.contiguous.output_tokens == found.paged.output_tokens == due
    assert list(found.lengths) == [len(ask.prompt) + ask.params.max_tokens for ask in asks]
    assert max(found.lengths) <= PLAN.serving.reserve


def test_pages_waste_less_hold_more_and_share(found):
    assert found.paged.waste < found.contiguous.waste
    assert found.paged.running > found.contiguous.running
    assert found.paged.steps < found.contiguous.steps
    assert found.paged.saved > found.contiguous.saved
    assert claims.serving_claim(found).startswith("Served from pages, the same memory holds ")
    assert " more answers at once" in claims.serving_claim(found)


def test_samples_share_the_whole_blocks_of_their_prompt(found):
    samples = found.samples
    assert len(samples.tables) == len(samples.answers) == PLAN.serving.samples
    assert samples.shared == len(samples.prompt.encode()) // BLOCK > 0
    assert samples.distinct == samples.listed - (PLAN.serving.samples - 1) * samples.shared
    picture = ElementTree.fromstring(block_map.sample_tables(samples, title="t"))
    numbers = [int(text.text) for text in picture.iter(f"{SVG}text") if text.get("class").startswith("number")]
    assert numbers == [block for table in samples.tables for block in table.blocks]
    full = [cell for cell in picture.iter(f"{SVG}rect") if cell.get("class") == "cell filled"]
    assert len(full) == PLAN.serving.samples * samples.shared


def test_spans_are_the_frames(served):
    seen = {}
    for span in block_map.spans(served.frames):
        for n, (filled, tables) in enumerate(zip(span.filled, span.tables, strict=True)):
            assert (span.start + n, span.block) not in seen
            seen[span.start + n, span.block] = (span.request, tables, filled)
    assert seen == {(step, block): cell for step, frame in enumerate(served.frames) for block, cell in frame.cells().items()}


def test_the_picture_has_a_colour_for_each_request_and_true_areas(served):
    steps, blocks = served.steps + 50, PLAN.serving.blocks
    picture = ElementTree.fromstring(block_map.block_map(served, title="a & b", blocks=blocks, steps=steps))
    assert picture.get("role") == "img"
    assert picture.get("aria-label").startswith("a & b: ")
    owners = [group for group in picture.iter(f"{SVG}g") if group.get("class") == "owner"]
    hues = {re.fullmatch(r"--hue:([\d.]+)", group.get("style"))[1] for group in owners}
    ran = {table.request for frame in served.frames for table in frame.tables}
    assert len(owners) == len(hues) == len(ran) == PLAN.serving.requests
    assert hues == {block_map.hue_of(request) for request in ran}
    paths = {kind: "".join(path.get("d") for path in picture.iter(f"{SVG}path") if path.get("class") == kind) for kind in KINDS}
    across = (block_map.WIDTH - block_map.RIGHT - block_map.LEFT) / steps
    down = 0.85 * (block_map.HEIGHT - block_map.BOTTOM - block_map.TOP) / blocks
    cells = [cell for frame in served.frames for cell in frame.cells().values()]
    room = sum(float(h) * float(w) for h, w in re.findall(r"v-([\d.]+)h([\d.]+)", paths["room"]))
    assert room == pytest.approx(len(cells) * across * down, rel=0.02)
    shared = sum(float(b) - float(a) for a, b in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", paths["shared"]))
    assert shared == pytest.approx(sum(cell.tables > 1 for cell in cells) * across, rel=0.05)
    # an outline rises between steps, while slots fill at once
    assert outlined(paths["filled"]) == pytest.approx(sum(cell.filled for cell in cells) / BLOCK * across * down, rel=0.05)


def outlined(path: str) -> float:
    """Returns the area of closed outlines of the form M x y L x y ... V y z."""
    area = 0.0
    for start, corners, base in re.findall(r"M([\d. ]+)((?:L[\d. ]+)+)V([\d.]+)z", path):
        points = [tuple(map(float, corner.split())) for corner in (start, *corners[1:].split("L"))]
        points.append((points[-1][0], float(base)))
        area += abs(sum(x * v - u * y for (x, y), (u, v) in zip(points, [*points[1:], points[0]], strict=True))) / 2
    return area


def test_hues_differ_however_many_requests_there_are():
    hues = [float(block_map.hue_of(request)) for request in range(40)]
    assert len(set(hues)) == 40
    assert all(0 <= hue < 360 for hue in hues)
    assert all(min(abs(a - b), 360 - abs(a - b)) > 40 for a, b in pairwise(hues))


def test_greedy_answers_are_those_that_transformers_generates(folder, found):
    from transformers import AutoModelForCausalLM

    side = serving.Side(PLAN.serving, folder, "cpu", serving.requests(PLAN.serving, bytes(training.corpus().tolist())), "paged")
    while side.done < 1:
        side.turn()
    greedy = [output for output in side.outputs if len(output.outputs) == 1]
    with training.quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for output in greedy:
        ids = torch.tensor([output.prompt_token_ids])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(output.outputs[0].token_ids), do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert made[0, ids.shape[1] :].tolist() == output.outputs[0].token_ids
    said = found.check
    assert (said.answers, said.tokens, said.agreeing) == (
        len(greedy), sum(len(output.outputs[0].token_ids) for output in greedy), said.tokens,
    )  # fmt: skip
    assert f"{said.tokens:,} of {said.tokens:,} bytes" in claims.check_claim(said)
    # one wrong byte is found
    greedy[0].outputs[0].token_ids[-1] ^= 1
    with pytest.raises(ArithmeticError, match=r"greedy bytes from pages 1 are not the choice of Transformers"):
        serving.check(folder, greedy, "cpu")


def test_one_thread_is_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with one_thread(torch.device("cuda")):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sentences_follow_the_numbers_also_where_they_are_against_us(found):
    turned = replace(found, contiguous=found.paged, paged=replace(found.contiguous, allocator="paged"))
    assert "fewer answers at once" in claims.serving_claim(turned)
    assert "more steps" in claims.pace_claim(turned)
    unsure = replace(found.check, agreeing=found.check.tokens - 2, behind=2e-6)
    assert "In the other 2 its best score is ahead by no more than 2\xa0×\xa010⁻⁶" in claims.check_claim(unsure)


def test_the_page_shows_the_section(found):
    report = experiments.Report(plan=PLAN, reproduction=machine.reproduction("rooftile report"), serving=found)
    text = unescape(page.render(report))
    assert claims.serving_claim(found) in text
    assert claims.check_claim(found.check) in text
    assert text.count('class="owner"') == 2 * PLAN.serving.requests + 1
    assert f"{PLAN.serving.requests} requests for short texts" in text


def run_with(monkeypatch, **parts) -> experiments.Report:
    """Builds a report whose other experiments do nothing."""
    for module, name in (
        (experiments.machine, "survey"), (experiments.comparison, "compare"), (experiments.tiles, "tile_masks"),
        (experiments.precision, "measure"), (experiments.approximate, "measure"), (experiments.diagnosis, "diagnose_all"),
        (experiments.formats, "measure"), (experiments.recall, "measure"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *args: None)
    for name, part in parts.items():
        monkeypatch.setattr(experiments, name, part)
    return experiments.run(PLAN, "cpu", "rooftile report", Progress(PLAN.seconds))


def test_without_transformers_the_page_says_what_is_missing(monkeypatch):
    report = run_with(monkeypatch, find_spec=lambda name: None)
    assert set(report.missing) == {"training", "serving", "weights"}
    assert not report.failures
    assert page.render(report).count("The package transformers is not installed") >= 2


def test_without_a_trained_model_nothing_is_served(monkeypatch):
    def broken(*args):
        raise ArithmeticError("the loss is not finite")

    monkeypatch.setattr(experiments.training, "train_twice", broken)
    report = run_with(monkeypatch)
    assert set(report.failures) == {"training"}
    assert "There is no trained model to serve" in page.render(report)
