"""Every route asks for a key, but for those that hold no data. A test walks them all, so a new one is not forgotten."""

from __future__ import annotations

import asyncio
import os

import pytest
from fastapi.routing import APIRoute
from typer.testing import CliRunner

from rooftile.cli.app import app as commands
from rooftile.errors import InvalidInput
from rooftile.server.http.app import make_app
from rooftile.server.keys import Keys, new_key, read_keys
from rooftile.server.service import Service
from rooftile.server.settings import ServerSettings
from tests.server.inside import ask

KEY, LINE = new_key("ann")
OTHER, OTHER_LINE = new_key("bob")
KEYS = Keys(dict([LINE.split(":"), OTHER_LINE.split(":")]))
OPEN = {"/health", "/ping", "/", "/page.css", "/page.js", "/talk.js", "/markdown.js", "/live.js", "/icon.svg"}


def routes() -> list[tuple[str, str]]:
    async def listed() -> list[tuple[str, str]]:
        app = make_app(Service(ServerSettings(model="m")))._app
        # a route that is no APIRoute would not have the application's dependency
        assert all(isinstance(route, APIRoute) for route in app.routes)
        return [(method, route.path) for route in app.routes for method in sorted(route.methods)]

    return asyncio.run(listed())


ROUTES = routes()


def test_the_walk_finds_the_routes() -> None:
    assert len(ROUTES) == 33 + 16, "sixteen may be asked for their head, too"
    assert {path for _, path in ROUTES} >= OPEN


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \u00fc",
     "Bearer " + "x" * 9000],
    ids=range(10),
)  # fmt: skip
def test_without_its_key_no_route_answers(method, path, given) -> None:
    headers = {} if given is None else {"Authorization": given.encode()}
    answer = ask(method, path.replace("{name:path}", "x"), keys=KEYS, headers=headers)
    if path in OPEN:
        assert answer.status_code in (200, 503)
        return
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":
        error = answer.json()["error"]
        assert error.get("code", "invalid_api_key") == "invalid_api_key"
        assert error["type"] == "authentication_error"
        assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/models/", "/V1/models", "/v1/%6dodels", "/health/../v1/models", "/page.js/v1/models"]
)
def test_no_spelling_of_a_path_passes_by(path) -> None:
    assert ask("GET", path, keys=KEYS).status_code in (401, 404)


@pytest.mark.parametrize("key", [KEY, OTHER], ids=["first", "second"])
def test_each_key_opens(key) -> None:
    answer = ask("GET", "/v1/models", keys=KEYS, headers={"Authorization": f"Bearer {key}"})
    # the model has not been read
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_loading"


def test_names_of_keys() -> None:
    assert KEYS.name_of(f"Bearer {KEY}") == "ann"
    assert KEYS.name_of(f"bearer {OTHER}") == "bob"
    assert KEYS.name_of(None) is None
    assert Keys({}).name_of(None) == ""
    assert KEY not in LINE


def test_the_file_of_keys(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{LINE}\n{OTHER_LINE}\n")
    assert read_keys(file).name_of(f"Bearer {OTHER}") == "bob"
    assert read_keys(file, "s" * 16).name_of("Bearer " + "s" * 16) == "environment"
    for wrong, why in ((KEY, "line 1"), ("", "holds no key"), (f"{LINE}\n{LINE}", "line 2"), ("ann:12", "line 1")):
        file.write_text(wrong)
        with pytest.raises(InvalidInput, match=why) as error:
            read_keys(file)
        assert KEY not in str(error.value)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_keys(tmp_path / "none")
    with pytest.raises(InvalidInput, match="at least 16"):
        read_keys(None, "short")
    file.write_text(LINE.replace("ann", "environment"))
    with pytest.raises(InvalidInput, match="has a key named environment"):
        read_keys(file, "s" * 16)
    with pytest.raises(InvalidInput, match="1 to 64 letters"):
        new_key("a:b")


def test_a_key_may_have_any_bytes() -> None:
    """Bytes of the environment that are no text, and letters of any language, as clients send them in UTF-8."""
    for key in ("\u043a\u043b\u044e\u0447" * 4, os.fsdecode(b"\xff\xfe" * 8)):
        sent = key.encode(errors="surrogateescape")
        keys = read_keys(None, key)
        assert keys.name_of("Bearer " + sent.decode("latin-1")) == "environment"
        answer = ask("GET", "/v1/models", keys=keys, headers={"Authorization": b"Bearer " + sent})
        assert answer.status_code == 503
        assert keys.name_of("Bearer " + (sent + b"x").decode("latin-1")) is None


def test_the_command_prints_a_key_and_its_line() -> None:
    shown = CliRunner().invoke(commands, ["serve", "--new-key", "ann"])
    (_, key), (_, line) = (each.split() for each in shown.output.splitlines())
    name, digest = line.split(":")
    assert Keys({name: digest}).name_of(f"Bearer {key}") == "ann"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.5", "example.org"])
def test_without_keys_only_loopback(host) -> None:
    with pytest.raises(InvalidInput, match=r"is open to others; give --api-key-file, or --open"):
        ServerSettings(model="m", host=host)
    assert not ServerSettings(model="m", host=host, open=True).on_loopback
    assert not ServerSettings(model="m", host=host, keys=KEYS).on_loopback
    assert ServerSettings(model="m", host="::1").on_loopback


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 503), ("localhost", 503), ("[::1]:8000", 503), ("127.0.0.2", 503), ("evil.example", 403),
        ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("", 403),
        ("10.0.0.1", 403), ("mine.example", 503), ("mine.example:8000", 503),
        ("LocalHost:8000", 503), ("Mine.Example", 503), ("localhost@evil.example", 403), ("evil.example@localhost", 403),
    ],
)  # fmt: skip
def test_a_foreign_host_header_is_refused_on_every_route(host, status) -> None:
    for path in ("/v1/models", "/health"):
        answer = ask("GET", path, headers={"Host": host}, allowed_hosts=("mine.example",))
        assert answer.status_code == status, (path, answer.text)
    assert ask("GET", "/", headers={"Host": host}, allowed_hosts=("mine.example",)).status_code == (403 if status == 403 else 200)


def test_a_page_of_elsewhere_gets_no_permission() -> None:
    for method in ("OPTIONS", "POST", "GET"):
        answer = ask(
            method,
            "/v1/completions",
            headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
        )
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.status_code in (405, 503)
