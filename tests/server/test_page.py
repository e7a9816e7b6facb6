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
    [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript"), ("/icon.svg", "image/svg")],
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
    script = (PAGE / "page.js").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage", script)
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
