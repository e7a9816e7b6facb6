"""Bad calls and odd files of the recommenders' parts get one sentence, or the right answer."""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rooftile.errors import InvalidInput
from rooftile.recommend import HSTURecommender, time_edges
from rooftile.recommend.data import read_events
from rooftile.recommend.hstu.layer import HSTU
from rooftile.recommend.hstu.stochastic_length import stochastic_length
from rooftile.recommend.metrics import auc, hit_rate, ranks


def _model(**options: float) -> HSTURecommender:
    return HSTURecommender(10, dim=8, heads=2, layers=1, longest=8, buckets=0, **options)  # type: ignore[arg-type]


EVENTS, CU = torch.arange(6), torch.tensor([0, 2, 2, 6])
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "offsets as a list": (lambda: _model()(EVENTS, [0, 2, 6]), "cu is"),
    "offsets that end too early": (lambda: _model()(EVENTS, CU[:-1]), "cu"),
    "offsets of a loss": (lambda: _model().loss(EVENTS, CU.double()), "cu"),
    "more targets than events": (lambda: _model()(EVENTS, CU, targets=3), "user 0 has 2 events and 3 targets"),
    "negative targets": (lambda: _model()(EVENTS, CU, targets=-1), "-1 targets"),
    "targets of other users": (lambda: _model()(EVENTS, CU, targets=torch.ones(2, dtype=torch.long)), "targets is"),
    "targets of another type": (lambda: _model()(EVENTS, CU, targets="2"), "targets is"),
    "a temperature of 0": (lambda: _model(temperature=0.0), "temperature is 0"),
    "edges without buckets": (lambda: HSTU(8, 2, edges=torch.tensor([1])), "edges came"),
    "edges as a list": (lambda: HSTU(8, 2, buckets=2, edges=[1]), "edges is"),
    "more buckets than floats": (lambda: time_edges(4000), "fewer buckets"),
    "a wide unit": (lambda: time_edges(300, unit=1e300), "fewer buckets"),
    "a wide step": (lambda: time_edges(3, "sqrt", 1e150), "fewer buckets"),
    "a length below 1": (lambda: stochastic_length(CU, -4), "longest is -4"),
    "a length in words": (lambda: stochastic_length(CU, "4"), "longest is"),
    "no offsets": (lambda: stochastic_length(CU[:0], 4), "cu is"),
    "an item that has no score": (lambda: ranks(torch.zeros(1, 3), torch.tensor([3])), "item 3"),
    "an item below 0": (lambda: ranks(torch.zeros(1, 3), torch.tensor([-1])), "item -1"),
    "a mean over nothing": (lambda: hit_rate(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), 1), "no rows"),
    "groups without order": (
        lambda: auc(torch.rand(2), torch.tensor([0, 1]), torch.full((2,), torch.nan)), "whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls_get_a_sentence(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(InvalidInput, match=words):
        call()


@pytest.mark.parametrize(
    "text",
    [
        "1::5::4::10\n\n2::6::3::11\n1::7::5::12\n\n",
        "userId,movieId,rating,timestamp\r\n1,5,4,10\r\n\r\n2,6,3,11\r\n1,7,5,12\r\n",
        '{"user":1,"item":5,"timestamp":10}\n\n{"user":2,"item":6,"timestamp":11}\n{"user":1,"item":7,"timestamp":12}\n \n',
    ],
    ids=["dat", "csv", "json"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_byte_order_marks_and_blank_lines_are_no_events(text: str, packed: bool, tmp_path: Path) -> None:
    file, raw = tmp_path / ("x.gz" if packed else "x"), codecs.BOM_UTF8 + text.encode()
    file.write_bytes(gzip.compress(raw) if packed else raw)
    events = read_events(file)
    assert events.cu.tolist() == [0, 2, 3]
    assert events.items.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    "line", ["1::5::4::inf", "1::5::4::1e30", "::5::4::10", "1::::4::10", '{"user":1', '{"user":1}\n[1]', '{"user":"","item":1}']
)
def test_lines_that_say_no_event_are_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(line)
    with pytest.raises(InvalidInput, match="event 1"):
        read_events(tmp_path / "x")
