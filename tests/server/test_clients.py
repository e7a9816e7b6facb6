"""Requests as real clients send them: messages with fields of their own, pages in a browser, curl, half-closed connections."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rooftile.engine import LLM
from rooftile.engine.text.chat_template import text_of
from rooftile.errors import InvalidInput, Unsupported
from rooftile.server.http.openai.conversation import CHANGING, read_messages
from rooftile.server.observe.metrics import LIKE_VLLM
from rooftile.server.refusals import Refusal
from rooftile.server.settings import origins_of
from tests.engine.asking import ROOM
from tests.server.asking import CHATS, COMPLETIONS, TALK, TEXT, refused
from tests.server.inside import ask
from tests.server.live import ROOT, Server
from tests.server.sockets import connect, request, status

# histograms, counters and gauges of vLLM 0.11 (vllm/v1/metrics/loggers.py), without the prefix
OF_VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
    "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds", "cache_config_info",
}  # fmt: skip
ORIGIN = "https://page.example"


def said(server: Server, messages: object) -> tuple[str, int]:
    answer = server.post(CHATS, TALK | {"messages": messages, "temperature": 0, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]["prompt_tokens"]


def test_fields_of_other_clients_change_nothing(server) -> None:
    plain = [{"role": "user", "content": "The roof"}, {"role": "assistant", "content": "is"}, {"role": "user", "content": "wet"}]
    more = {
        "id": "msg_1", "timestamp": 17, "cache_control": {"type": "ephemeral"}, "metadata": {"a": [1]}, "annotations": [{"a": 1}],
        "reasoning_content": "I think", "reasoning": None, "reasoning_details": [{}], "provider_specific_fields": None,
        "tool_calls": [], "function_call": None, "audio": None, "refusal": None, "prefix": False, "images": [],
    }  # fmt: skip
    assert said(server, [each | more for each in plain]) == said(server, plain)
    # an answer that was cut off before its first word
    for empty in ({"content": None}, {"content": ""}, {}):
        odd = [plain[0], {"role": "assistant"} | empty, plain[2]]
        assert said(server, odd) == said(server, [plain[0], {"role": "assistant", "content": ""}, plain[2]])


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_a_field_that_changes_the_meaning_is_refused_by_name(name: str) -> None:
    for value in (True, "x", [{"a": 1}], {"a": 1}):
        with pytest.raises(Refusal, match=rf"messages\[0\]\.{name} is not supported: ") as raised:
            read_messages([{"role": "assistant", "content": "a", name: value}])
        assert (raised.value.code, raised.value.param) == ("unsupported", f"messages[0].{name}")
    for value in (None, [], {}, "", False):
        assert read_messages([{"role": "assistant", "content": "a", name: value}]) == [{"role": "assistant", "content": "a"}]


def test_what_a_model_has_thought_reaches_the_template() -> None:
    due = [{"role": "assistant", "content": "a", "reasoning_content": "hm", "reasoning": "hm", "thinking": "hm"}]
    for name in ("reasoning_content", "reasoning"):
        assert read_messages([{"role": "assistant", "content": "a", name: "hm"}]) == due


def test_text_of_parts() -> None:
    assert text_of([{"type": "text", "text": "a"}, {"type": "output_text", "text": " b\n"}, "c", {"text": ""}]) == "a\n b\n\nc\n"
    assert (text_of(None), text_of([]), text_of("a")) == ("", "", "a")
    for bad in (5, [5], {"text": "a"}, [{"type": "text"}], [{"type": "text", "text": None}], b"a"):
        with pytest.raises(InvalidInput, match=r"^where "):
            text_of(bad, "where")
    with pytest.raises(Unsupported, match="where has a part of type 'image_url'; a model reads text"):
        text_of([{"type": "image_url", "image_url": {"url": "x"}}], "where")


def test_the_library_joins_parts_too(folder: Path) -> None:
    llm = LLM(folder, **ROOM)
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "roof"}]
    chat = llm.get_tokenizer().chat
    assert chat([{"role": "user", "content": parts}]) == chat([{"role": "user", "content": "The\nroof"}])
    assert chat([{"role": "assistant", "content": None}]) == chat([{"role": "assistant", "content": ""}])
    assert parts == [{"type": "text", "text": "The"}, {"type": "text", "text": "roof"}]


def test_the_official_client_sends_its_answers_back(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    asked = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=[{"role": "user", "content": "The roof"}], **asked)
    back = first.choices[0].message.model_dump() | {"reasoning_content": "hm", "id": first.id}
    again = client.chat.completions.create(
        messages=[{"role": "user", "content": [{"type": "text", "text": "The roof"}]}, back, {"role": "user", "content": "and"}],
        **asked,
    )
    assert again.choices[0].finish_reason in ("stop", "length")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("headers", [[], ["-H", "Content-Type:"], ["-H", "Content-Type: application/json; charset=utf-8"]])
def test_curl_needs_no_content_type(headers: list[str], server) -> None:
    words = ["curl", "-sS", "--noproxy", "*", f"{server.url}{COMPLETIONS}", *headers, "-d", json.dumps(TEXT)]
    found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(found.stdout)["object"] == "text_completion", found.stdout


def test_a_page_must_ask_before_it_sends(server) -> None:
    """A form of any page may be sent without asking, and a browser names the page; JSON it may not."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""):
        for origin in (ORIGIN, "null", server.url):
            headers = {"Origin": origin} | ({"Content-Type": kind} if kind else {})
            answer = server.client.post(COMPLETIONS, content=json.dumps(TEXT), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "not_json"), (kind, origin)
    plain = server.client.post(COMPLETIONS, content=json.dumps(TEXT), headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415


PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-a"}


def test_a_preflight_is_answered_where_its_origin_is_allowed() -> None:
    for allowed in ((ORIGIN,), ("*",), ("https://b.example", ORIGIN)):
        answer = ask("OPTIONS", CHATS, headers=PREFLIGHT, allowed_origins=allowed)
        assert (answer.status_code, answer.content) == (204, b"")
        names = [name for name in answer.headers if name.startswith("access-control")]
        assert len(names) == len(set(names)) == 5
        assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN]
        assert answer.headers["access-control-allow-headers"] == "authorization,x-a"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "origin" in answer.headers["vary"]
        # also of a request that is refused, so that the page can read why
        late = ask("POST", CHATS, headers={"Origin": ORIGIN}, json=TALK, allowed_origins=allowed)
        assert (late.status_code, late.headers["access-control-allow-origin"]) == (503, ORIGIN)
        assert "x-request-id" in late.headers["access-control-expose-headers"]
    for allowed in ((), ("https://b.example",)):
        answer = ask("OPTIONS", CHATS, headers=PREFLIGHT, allowed_origins=allowed)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert ask("GET", "/health", allowed_origins=("*",)).headers.get("access-control-allow-origin") is None
    assert ask("OPTIONS", CHATS, headers={"Origin": ORIGIN}, allowed_origins=("*",)).status_code == 405
    local = PREFLIGHT | {"Access-Control-Request-Private-Network": "true"}
    answer = ask("OPTIONS", CHATS, headers=local, allowed_origins=("*",))
    assert answer.headers["access-control-allow-private-network"] == "true"


def test_origins_as_words_and_as_json() -> None:
    assert origins_of(['["https://A.example", "*"]', "http://b:80/, https://c"]) == (
        "https://a.example",
        "*",
        "http://b:80",
        "https://c",
    )
    for bad in ("[1]", "[", "[null]"):
        with pytest.raises(InvalidInput, match=r"--allowed-origins is .*; must be a list of texts in JSON"):
            origins_of([bad])


def half_closed(server: Server, body: dict) -> tuple[bytes, socket.socket]:
    """Sends a request, shuts the sending half down, and returns all that comes until the server closes."""
    made = connect(server, 60.0)
    made.sendall(request(body))
    made.shutdown(socket.SHUT_WR)
    found = b""
    while part := made.recv(65536):
        found += part
    return found, made


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 400, "ignore_eos": True}], ids=str)
def test_a_half_closed_connection_gets_its_answer(fields: dict, server) -> None:
    found, made = half_closed(server, TEXT | fields)
    with made:
        assert status(found) == 200, found[:300]
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    # the other heads may have been written before the end of the requests came
    assert b"connection: close" in head.lower() or "ignore_eos" not in fields
    if "stream" in fields:
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == fields.get("max_tokens", TEXT["max_tokens"])


def test_requests_ahead_of_a_half_closed_connection_are_answered(server) -> None:
    with connect(server, 60.0) as made:
        made.sendall(request(TEXT) + request(TEXT | {"max_tokens": 2}) + request({"prompt": 5}))
        made.shutdown(socket.SHUT_WR)
        found = b""
        while part := made.recv(65536):
            found += part
    assert re.findall(rb"HTTP/1\.1 (\d+) ", found) == [b"200", b"200", b"400"]


def test_who_has_left_is_noticed_though_half_a_connection_looks_alike(server) -> None:
    server.wait_until_idle()
    before = server.metric("request_success_total", finished_reason="abort")
    made = connect(server)
    made.sendall(request(TEXT | {"max_tokens": 2000, "ignore_eos": True}))
    until = time.monotonic() + 300
    while server.metric("num_requests_running") == 0:
        assert time.monotonic() < until
    made.close()
    server.wait_until_idle()
    assert server.metric("request_success_total", finished_reason="abort") == before + 1


def test_half_a_request_gets_no_answer(server) -> None:
    with connect(server) as made:
        made.sendall(request(TEXT)[:-3])
        made.shutdown(socket.SHUT_WR)
        assert made.recv(65536) == b""


def test_more_tokens_than_fit_are_told(server) -> None:
    """2,048 is the longest sequence of this server."""
    prompt = [5] * 2000
    asked = {"prompt": prompt, "ignore_eos": True, "max_tokens": 2000}
    answer = server.post(COMPLETIONS, asked)
    usage = answer.json()["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (48, {"max_tokens": 48})
    assert answer.headers["x-max-tokens"] == "48"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    *_, last = server.events(**asked, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens_details"] == {"max_tokens": 48}
    with server.client.stream("POST", COMPLETIONS, json=asked | {"stream": True}) as stream:
        assert stream.headers["x-max-tokens"] == "48"
    for fits in ({"max_tokens": 48}, {}):
        answer = server.post(COMPLETIONS, {"prompt": prompt, "ignore_eos": True} | fits)
        assert "x-max-tokens" not in answer.headers
        assert "completion_tokens_details" not in answer.json()["usage"]
    # the longest prompt has the least room
    answer = server.post(COMPLETIONS, {"prompt": [[5], prompt], "max_tokens": 60})
    assert answer.headers["x-max-tokens"] == "48"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    found = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], max_completion_tokens=9999)
    assert found.usage.completion_tokens_details.max_tokens < 2048


@pytest.mark.parametrize(
    ("path", "fields", "sentence", "param"),
    [
        (CHATS, {"logprobs": True, "top_logprobs": 30}, "top_logprobs is 30; must be", "top_logprobs"),
        (CHATS, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens is 0; must", "max_completion_tokens"),
        (
            CHATS, {"max_tokens": None, "max_completion_tokens": 3, "min_tokens": 5},
            "min_tokens is 5 and max_completion_tokens 3;", "min_tokens",
        ),
        (CHATS, {"bad_words": ["a"], "response_format": {"type": "json_object"}}, "given with response_format,", "bad_words"),
        (
            COMPLETIONS, {"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "given with structured_outputs, which",
            "ignore_eos",
        ),
        (COMPLETIONS, {"n": 17}, "n is 17; must be a whole number from 1 to 16", "n"),
        (COMPLETIONS, {"stop_token_ids": [5] * 20}, "there are 20 stop_token_ids; there may be", "stop_token_ids"),
        (COMPLETIONS, {"stop": ["a"] * 20}, "there are 20 stops; there may be", "stop"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_was_sent(path, fields, sentence, param, server) -> None:
    body = {name: value for name, value in ((TEXT if path == COMPLETIONS else TALK) | fields).items() if value is not None}
    assert sentence in refused(server, path, body, "invalid_value", param)


def test_series_have_the_model_and_the_names_of_vllm(server) -> None:
    server.complete()
    text = server.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert families
    for family in families:
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny", sample
    names = {sample.name.removeprefix("rooftile:") for family in families for sample in family.samples}
    found = {name for name in OF_VLLM if name in names or f"{name}_bucket" in names}
    assert found == set(LIKE_VLLM)
    page = (ROOT / "docs" / "how-to" / "run-a-server.md").read_text()
    table = page.partition("| like vLLM's |")[2].partition("\n\n")[0]
    listed = [name for name in re.findall(r"`(\w+)`", table) if "_" in name and name != "finished_reason"]
    assert listed == list(LIKE_VLLM)
    assert "carry over" not in page
    own = re.findall(r"`(\w+)`", page.partition("It adds ")[2].partition("\n\n")[0])
    # each sum has a series with the time of its start, too
    bases = {name for family in families if not (name := family.name.removeprefix("rooftile:")).endswith("_created")}
    # a server without drafts names no method
    assert {name.removesuffix("_total") for name in (*own, *LIKE_VLLM)} == bases | {"draft_method"}


def test_a_server_with_its_own_template_keys_and_pages(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0]['content'] }}!{{ messages[0]['reasoning_content'] }}")
    key = "a-key-of-sixteen-letters"
    options = ("--chat-template", str(template), "--api-key", key, "--allowed-origins", f'["{ORIGIN}"]')
    with Server(folder, *options, "--dtype", "torch.float32") as made:
        assert made.post(COMPLETIONS, TEXT).status_code == 401
        made.client.headers["Authorization"] = f"Bearer {key}"
        talk = [{"role": "user", "content": "The roof", "reasoning_content": "?"}]
        tokens = made.post("/tokenize", messages=talk).json()["tokens"]
        assert tokens == made.post("/tokenize", prompt="The roof!?", add_special_tokens=False).json()["tokens"]
        assert made.post(CHATS, TALK | {"messages": talk}).json()["usage"]["prompt_tokens"] == len(tokens)
        with httpx.Client(base_url=made.url, trust_env=False) as page:
            # a browser sends no key with a preflight
            assert page.options(CHATS, headers=PREFLIGHT).status_code == 204


def test_a_setting_that_the_model_refuses_is_told_by_its_flag(folder: Path) -> None:
    words = ["-m", "rooftile", "serve", str(folder), "--port", "0", "--device", "cpu", "--max-model-len", "99999"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--max-model-len is 99,999; the model has positions for 2 to 8,192" in done.stderr
