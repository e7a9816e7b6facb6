"""The page at /: it is complete in itself, shows text as text, and its pictures move."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlparse

import pytest

from rooftile.engine import SamplingParams
from tests.server.browser import CHROMIUM, Browser
from tests.server.inside import ask
from tests.server.small import KEY

PAGE = Path(__file__).resolve().parents[2] / "rooftile" / "server" / "page"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
        ("/markdown.js", "text/javascript"),
        ("/icon.svg", "image/svg"),
    ],
)
def test_the_files_come_with_a_policy(path, kind) -> None:
    answer = ask("GET", path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_comes_from_elsewhere_and_nothing_is_markup() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(PAGE.iterdir()))
    links = set(re.findall(r"https?://[^\s\"'`)]+", text))
    # the name of a namespace, which nobody fetches
    assert links == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage", text)
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|style=|<style|<script>", page), "the policy forbids what stands in the page itself"
    for label in re.findall(r'<label[^>]*for="(\w+)"', page):
        assert f'id="{label}"' in page


PROMPT = '<script>document.title = "broken"</script><img src=x>'


def long_seed(llm) -> int:
    """Returns a seed with which the model answers for long."""
    for seed in range(100):
        (output,) = llm.generate(PROMPT, SamplingParams(seed=seed, max_tokens=1500))
        if output.outputs[0].finish_reason == "length":
            return seed
    raise AssertionError("no answer is long")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(server, llm, tmp_path) -> None:
    seed = long_seed(llm)
    browser = Browser(tmp_path / "profile")
    field = "document.getElementById"
    try:
        browser.call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
        browser.call("Page.navigate", url=server.url + "/")
        browser.wait(f"{field}('status')?.textContent.startsWith('tiny')")
        browser.run(f"{field}('tab-prompt').click()")
        assert browser.run(f"{field}('prompt').value") == ""
        browser.run(f"{field}('prompt').value = {json.dumps(PROMPT)}; {field}('seed').value = {seed}")
        browser.run(f"{field}('max_tokens').value = 1900; {field}('form').requestSubmit()")
        browser.wait(f"{field}('answer').textContent.length > 20")
        browser.wait("document.querySelectorAll('#pool .used').length > 0")
        browser.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        browser.wait(f"{field}('stop').disabled")
        browser.wait("document.querySelector('#chart polyline')?.getAttribute('points').includes(' ')")
        browser.run(f"{field}('max_tokens').value = 30; {field}('form').requestSubmit()")
        browser.wait(f"{field}('usage').textContent.includes('30 of answer')")
        assert browser.run("document.querySelectorAll('#answer *').length") == 0
        assert browser.run("document.title") == "Rooftile server"
        assert browser.run(f"{field}('error').hidden")
        browser.run(f"{field}('max_tokens').value = -1; {field}('form').noValidate = true")
        browser.run(f"{field}('form').requestSubmit()")
        browser.wait(f"{field}('error').textContent.includes('max_tokens is -1')")
        asked = [each["params"]["request"]["url"] for each in browser.events if each["method"] == "Network.requestWillBeSent"]
        assert {urlparse(url).netloc for url in asked} == {urlparse(server.url).netloc}
        told = browser.told("Runtime.exceptionThrown", "Log.entryAdded")
        # the browser itself notes the answer 400
        assert ["400" in each["params"].get("entry", {}).get("text", "") for each in told] == [True]
    finally:
        browser.close()
    server.wait_until_idle()


# what the page writes to and reads from a server, in place of one: the next streams of an answer each, and the bodies that came
SCRIPTED = """
window.asked = [];
window.streams = %s;
window.theirs = window.fetch;
window.fetch = (path, options) => {
  if (!options?.body) return window.theirs(path, options);
  window.asked.push(JSON.parse(options.body));
  const usage = {prompt_tokens: 9, completion_tokens: 5, prompt_tokens_details: {cached_tokens: 0}};
  const events = [...window.streams.shift().map((delta) => ({choices: [{delta}]})), {choices: [], usage}];
  const text = events.map((each) => `data: ${JSON.stringify(each)}\\n\\n`).join("") + "data: [DONE]\\n\\n";
  return Promise.resolve(new Response(new Blob([text]).stream()));
};
"""
MARKDOWN = """Two *kinds* of **roofs** with `x < 1`, <b>no markup</b>, [a page](https://roof.example/a) and ![a picture](http://x/y.png):

# Title
1. flat
2. steep
   - slate
   - tile

> said
> twice

| a | b |
|---|--:|
| 1 | `2|3` |

```python
if x < 1:
    print("<i>")

done()
```
https://bare.example/b. snake_case_name ~~gone~~
***
unclosed **bold and `code"""
CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_conversation(server, tmp_path) -> None:
    """Markdown as elements, a thought and a call folded, results given, an error taken back, all by the keyboard."""
    streams = [
        [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm, "}, {"reasoning_content": "roofs."}]
        + [{"content": MARKDOWN[n : n + 7]} for n in range(0, len(MARKDOWN), 7)],
        [{"content": "I look."}, {"tool_calls": [CALL]}, {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}],
        [{"content": "Sunny."}],
    ]  # fmt: skip
    browser, field = Browser(tmp_path / "profile"), "document.getElementById"
    key = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: %s, bubbles: true, cancelable: true}))"

    def ask(text: str) -> None:
        browser.run(f"{field}('message').focus(); {field}('message').value = {json.dumps(text)}")
        browser.run(key % "'Enter'")

    def count(selector: str) -> int:
        return browser.run(f"document.querySelectorAll({json.dumps('#talk ' + selector)}).length")

    try:
        browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        browser.call("Page.navigate", url=server.url + "/")
        browser.wait(f"{field}('status')?.textContent.startsWith('tiny')")
        browser.run(SCRIPTED % json.dumps(streams))
        ask("Which roofs?\n<b>?")
        browser.wait(f"{field}('usage').textContent.includes('5 of answer')")
        browser.wait("document.querySelectorAll('#talk table').length === 1")
        assert browser.run("document.querySelector('#talk .user .text').textContent") == "Which roofs?\n<b>?"
        assert browser.run("document.querySelector('.thought').open") is False
        assert browser.run("document.querySelector('.thought pre').textContent") == "Hm, roofs."
        text = "document.querySelector('.assistant .text')"
        kinds = ["P", "H3", "OL", "BLOCKQUOTE", "DIV", "PRE", "P", "HR", "P"]
        assert browser.run(f"[...{text}.children].map((each) => each.tagName)") == kinds
        assert [count(each) for each in ("strong", "em", "del", "b", "img", "i", "ol > li", "ul > li", "td")] == [
            1, 1, 1, 0, 0, 0, 2, 2, 3,
        ]  # fmt: skip
        links = "[...document.querySelectorAll('#talk a')].map((each) => each.href)"
        assert browser.run(links) == ["https://roof.example/a", "https://bare.example/b"]
        assert browser.run(f"{text}.querySelector('pre').textContent") == 'if x < 1:\n    print("<i>")\n\ndone()'
        assert browser.run(f"{text}.lastChild.textContent") == "unclosed **bold and `code"
        assert "snake_case_name" in browser.run(f"{text}.textContent")
        wide = "document.documentElement.scrollWidth <= innerWidth"
        assert browser.run(wide), "a phone would have to scroll sideways"

        browser.run(f"{field}('tools').value = '[{{}}]'; {field}('system').value = 'Be short.'")
        ask("And in Rome?")
        browser.wait("document.querySelectorAll('li.tool textarea').length === 1")
        assert browser.run("document.querySelector('.call summary').textContent") == "Calls weather"
        browser.run("document.querySelector('li.tool textarea').value = '25 C'")
        browser.run("document.querySelector('li.tool form').requestSubmit()")
        browser.wait(f"{field}('talk').lastChild.textContent === 'Sunny.'")
        called = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        sent = browser.run("window.asked.at(-1)")
        assert sent["tools"] == [{}]
        assert sent["messages"] == [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Which roofs?\n<b>?"},
            {"role": "assistant", "content": MARKDOWN},
            {"role": "user", "content": "And in Rome?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call-1", "content": "25 C"},
        ]

        # a question that the server refuses comes back, to be mended
        browser.run(f"window.fetch = window.theirs; {field}('tools').value = ''; {field}('max_tokens').value = -1")
        ask("Again?")
        browser.wait(f"{field}('error').textContent.includes('max_tokens is -1')")
        assert browser.run(f"{field}('message').value") == "Again?"
        assert count("> li") == 6
        browser.run(f"{field}('tab-chat').focus()")
        browser.run(key % "'ArrowRight'")
        assert browser.run("document.activeElement.id") == "tab-prompt"
        assert browser.run(f"[{field}('chat').hidden, {field}('raw').hidden]") == [True, False]
        browser.run(f"{field}('new').click()")
        assert count("> li") == 0
    finally:
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_without_its_key_the_page_asks_once(small, tmp_path) -> None:
    """A page that is left open must not fill the server's log, a line per second."""
    browser = Browser(tmp_path / "profile")
    status = "document.getElementById('status')?.textContent"

    def asked(path: str) -> int:
        return sum(
            urlparse(each["params"]["request"]["url"]).path == path
            for each in browser.events
            if each["method"] == "Network.requestWillBeSent"
        )

    try:
        browser.call("Page.navigate", url=small.url + "/")
        browser.wait(f"{status} === 'the server asks for an API key'")
        begun = asked("/health")
        while asked("/health") < begun + 3:
            browser.wait(f"{status} === 'the server asks for an API key'")
        assert asked("/metrics") == 1
        browser.run(f"document.getElementById('key').value = {json.dumps(KEY)}")
        browser.wait(f"{status}.startsWith('tiny')")
        assert asked("/metrics") >= 2
    finally:
        browser.close()
