"""Frames: messages come out as they went in, however the bytes are cut, and what is no message is refused."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.engine.requests.stats import EngineStats
from rooftile.server.engine.messages import Abort, Add, AnswerPiece, News, Order, Report, Scored, StepNews
from rooftile.server.engine.wire import MOST_BYTES, FrameReader, WireError, frame

ORDERS = [
    Add(1, [1, 2, 3], {"temperature": 0.5, "stop": ["a"], "logit_bias": {5: 1.0}}, "salt", False), Abort(1), Add(2, [7], {}),
]  # fmt: skip
STEP = StepNews(
    EngineStats(running=1, waste=0.5), taken=[1], started=[1],
    news=[News(1, [AnswerPiece(0, "é\U0001f600", 3, [[Scored(5, -0.5, "x")]], "stop", "x", -1.0, None)], True, 16, None)],
)  # fmt: skip


@given(st.lists(st.integers(0, 200), max_size=20))
def test_frames_may_be_cut_anywhere(cuts) -> None:
    data = b"".join(map(frame, ORDERS))
    reader = FrameReader(Order)
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    found = [message for start, end in pairwise(places) for message in reader.feed(data[start:end])]
    assert found == ORDERS


def test_a_step_crosses_as_it_is() -> None:
    assert FrameReader(Report).feed(frame(STEP)) == [STEP]


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_end_with_a_sentence(body) -> None:
    try:
        found = FrameReader(Order).feed(len(body).to_bytes(4, "big") + body)
    except WireError as error:
        found = [error]
    assert all(isinstance(each, Add | Abort) or "holds no message" in str(each) for each in found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "add", "id": "1", "prompt": [1], "params": {}},
        {"type": "add", "id": 1, "prompt": ["x"], "params": {}},
        {"type": "remove", "id": 1},
        {"id": 1},
        [1, 2],
    ],
)
def test_a_message_of_the_wrong_type_is_refused(wrong) -> None:
    body = msgspec.msgpack.encode(wrong)
    with pytest.raises(WireError):
        FrameReader(Order).feed(len(body).to_bytes(4, "big") + body)


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="67,108,865 bytes"):
        FrameReader(Order).feed((MOST_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(WireError, match="may have at most"):
        frame(Add(1, [], {"x": b"0" * MOST_BYTES}))


def test_deep_messages_are_refused() -> None:
    body = b"\x91" * 100_000 + b"\x01"
    with pytest.raises(WireError):
        FrameReader(Order).feed(len(body).to_bytes(4, "big") + body)
