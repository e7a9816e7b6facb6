"""Results at the end of a notebook's cell: a line as `repr`, and HTML that holds what `print` says and escapes every word."""

from __future__ import annotations

import copy
import json
import pickle
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.drawing import notebook as shown
from rooftile.engine.requests.output import CompletionOutput, RequestOutput
from rooftile.exact import masks
from rooftile.integrations.fusion.report import Fused
from rooftile.kvcache import PagedKV, Pages
from rooftile.kvcache.blocks import BlockPool
from rooftile_lab.bench.results import Row

HOSTILE = "<script>alert('&')</script>"
Q, K, V = (torch.randn(1, 16, 2, 32) for _ in range(3))


class Html(HTMLParser):
    """Reads HTML: its text, and its elements, which must close in order."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.text, self.tags, self._open = "", [], []
        self.feed(written)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class Mine(nn.Sequential):
    """A model with a name that a page must escape."""


Mine.__name__ = Mine.__qualname__ = HOSTILE


def answer(text: str | None, ids: list[int]) -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=ids, finish_reason="stop", stop_reason=HOSTILE)


def results() -> dict[str, object]:
    """Returns one result of each kind, with hostile words where a user's words go."""
    pool = BlockPool(8, 4)
    pool.append(pool.begin([1, 2, 3, 4, 5]), 5)
    prepared = rt.qat.prepare(nn.ModuleDict({HOSTILE.replace(".", ""): nn.Linear(64, 32)}), "int4:32")
    model, x = Mine(nn.Linear(64, 32), nn.GELU()), torch.randn(8, 64)
    blocks = rt.Blocks.from_dense(torch.eye(5, dtype=torch.bool))
    pages = Pages(4, 2, 1, 8, dtype=torch.float32)
    k, v = pages.layer(0)
    table, lengths = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32), torch.tensor([17, 3], dtype=torch.int32)
    return {
        "explain": rt.explain(Q, K, V, rt.CAUSAL),
        "explain linear": rt.explain(torch.randn(3, 64), rt.quantise_weight(torch.randn(32, 64), "w8")),
        "mask": rt.CAUSAL & rt.Window(1024), "full": rt.FULL, "window": rt.Window(2, 3), "far": rt.Window(masks.UNBOUNDED - 1),
        "blocks": blocks, "pages": pages, "paged": PagedKV(k, v, table, lengths), "pool": pool,
        "diagnosis": rt.diagnose(model, x, budget=0.05), "plan": rt.plan(model, x), "prepared": rt.qat.status(prepared),
        "fused": Fused({"norms": 3}, {f"layers.{n}.{HOSTILE}": HOSTILE for n in range(40)}), "status": rt.status(),
        "completion": answer(HOSTILE, [1, 2]),
        "request": RequestOutput(request_id=0, prompt=HOSTILE * 20, prompt_token_ids=[1] * 9, outputs=7 * [answer(HOSTILE, [1])]),
        "tokens": RequestOutput(request_id=1, prompt=None, prompt_token_ids=[1, 2, 3], outputs=[answer(None, [7, 8])]),
        "refused": RequestOutput(request_id=2, prompt="a\nb", prompt_token_ids=[1], error=HOSTILE),
        "row": Row(suite="attention", case=HOSTILE, backend="tiled", phase="fwd", device="d", commit="c", date="today"),
        "doctor": rt.doctor("cpu"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[str, object]:
    return results()


def test_every_result_is_one_line_and_a_card(made: dict[str, object]) -> None:
    for name, result in made.items():
        line, html = repr(result), result._repr_html_()
        assert "\n" not in line, name
        assert len(line) <= 260, (name, line)
        assert HOSTILE not in html, name
        # a card with something in it, closed in order, that loads nothing and runs nothing
        found = Html(html)
        assert html.startswith('<div class="rooftile"'), name
        assert {"table", "svg", "pre"} & set(found.tags), name
        assert not {"script", "link", "img", "iframe"} & set(found.tags), name
        assert "url(" not in html, name


@pytest.mark.parametrize("name", ["fused", "completion", "request", "refused", "row", "plan", "diagnosis", "prepared"])
def test_a_users_words_stand_there_as_they_are(made: dict[str, object], name: str) -> None:
    assert HOSTILE in Html(made[name]._repr_html_()).text


def test_a_diagnosis_and_a_plan_show_their_table_and_their_picture(made: dict[str, object]) -> None:
    for name in ("diagnosis", "plan"):
        found = Html(made[name]._repr_html_())
        assert {"svg", "table", "figure"} <= set(found.tags)
    assert made["diagnosis"].sentence in Html(made["diagnosis"]._repr_html_()).text
    assert all(op.op.split("::")[-1] in made["diagnosis"]._repr_html_() for op in made["diagnosis"].ops)
    assert all(option.format in made["plan"]._repr_html_() for layer in made["plan"].layers for option in layer.options)
    parts = (*made["diagnosis"].ops, made["diagnosis"].step, *made["plan"].layers)
    assert max(len(repr(part)) for part in parts) < 200


@pytest.mark.parametrize("mask", [rt.FULL, rt.CAUSAL, rt.CAUSAL & rt.Window(3), rt.Window(1, 2), rt.Prefix(5), rt.Chunk(4)])
def test_the_picture_of_a_mask_fills_what_is_visible(mask: rt.Mask) -> None:
    rects: list[dict[str, float]] = []

    class Rects(HTMLParser):
        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "rect" and dict(attrs).get("fill") != "none":
                rects.append({name: float(value or 0) for name, value in attrs})

    html = mask._repr_html_()
    Rects().feed(html)
    N = int(html.split("keys across, ")[1].split(" ")[0].replace(",", ""))
    cell = 192 / N
    drawn = torch.zeros(N, N, dtype=torch.bool)
    for rect in rects:
        first, last = round(rect["x"] / cell), round((rect["x"] + rect["width"]) / cell)
        drawn[round(rect["y"] / cell), first:last] = True
    assert torch.equal(drawn, masks.materialise(mask, N, N))


def test_explain_is_the_text_that_it_was_and_answers_as_values() -> None:
    found = rt.explain(Q, K, V, rt.CAUSAL)
    text = str(found)
    assert type(text) is str
    # what programs did with the text
    assert "sdpa     runs it" in found
    assert found.splitlines()[0].startswith("sizes ")
    assert f"{found}" == found == text
    assert json.loads(json.dumps(found)) == text
    assert found.backend == "sdpa"
    assert set(found.refusals) == {"hopper", "triton", "sdpa", "tiled", "eager"}
    assert found.refusals["sdpa"] == found.refusals["tiled"] == ()
    assert any("needs sm90" in reason for reason in found.refusals["hopper"])
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found), copy.copy(found)):
        assert (again, again.backend, again.refusals) == (found, found.backend, found.refusals)


def test_explain_where_every_backend_refuses_names_none() -> None:
    strange = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    found = rt.explain(strange, strange, strange, precision="fp8")
    assert (found.backend is None) == ("runs it" not in found)
    assert ("no backend runs it" in repr(found)) == (found.backend is None)


def test_a_long_text_is_cut_in_a_line_and_whole_in_a_card() -> None:
    long = "word " * 200
    output = RequestOutput(request_id=0, prompt=long, prompt_token_ids=[0] * 200, outputs=[answer(long, [0] * 200)])
    assert "…" in repr(output)
    assert len(repr(output)) < 160
    assert Html(output._repr_html_()).text.count(long.strip()) == 2


def test_an_answer_without_a_tokenizer_shows_its_tokens() -> None:
    output = RequestOutput(request_id=1, prompt=None, prompt_token_ids=[1, 2, 3], outputs=[answer("", [7, 8])])
    assert repr(output) == "RequestOutput(1: 3 tokens -> [7, 8] (stop))"
    assert "[7, 8]" in Html(output._repr_html_()).text


def test_tensors_without_data_are_shown_by_their_line() -> None:
    """A fake or a meta tensor has no numbers to read; a notebook prints a traceback for what raises."""
    blocks = rt.Blocks.from_dense(torch.eye(4, dtype=torch.bool, device="meta"))
    assert repr(blocks) in Html(blocks._repr_html_()).text
    k = torch.empty(4, 16, 1, 8, device="meta")
    table, lengths = torch.empty(2, 2, dtype=torch.int32, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    cache = PagedKV(k, k, table, lengths)
    assert repr(cache) in Html(cache._repr_html_()).text


def test_a_bar_of_a_pool_is_as_long_as_what_is_used() -> None:
    pool = BlockPool(8, 4)
    pool.append(pool.begin([1, 2, 3, 4, 5]), 5)
    assert repr(pool) == "BlockPool(8 blocks of 4 tokens: 2 used, 0 cached, 6 free)"
    assert 'width="48.00"' in pool._repr_html_()


def test_a_table_has_a_cell_for_each_value() -> None:
    html = Html(shown.table(("a", "b"), [("<x>", 1), ("y", 2)]))
    assert html.text == "ab<x>1y2"
    assert html.tags.count("td") == 4
