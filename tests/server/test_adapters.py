"""Adapters behind a server: chosen by the model's name, loaded and unloaded by clients with a key, from one folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers

from rooftile.engine import LLM, SamplingParams
from rooftile.errors import InvalidInput
from rooftile.server.engine.calls import EngineDown
from rooftile.server.keys import Keys
from rooftile.server.replicas import replica
from rooftile.server.replicas.known_adapters import KnownAdapters
from rooftile.server.settings import ServerSettings
from tests.engine.made_adapters import merged, write_adapter
from tests.server.live import Server
from tests.server.living import living
from tests.server.small import KEY, LINE, OTHER, OTHER_LINE
from tests.server.test_replicas import both_answer, series, until

PROMPT, PARAMS = "The roof is tiled", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ASKED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Adapted:
    """A server with two slots and one adapter, and what the models with merged adapters answer."""

    def __init__(self, base: Path, folder: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        self.root = folder / "may load"
        self.added = {
            name: write_adapter(self.root / name, model, ("q_proj", "down_proj"), 4, seed=seed) for seed, name in enumerate("abc")
        }
        self.due: dict[str | None, str] = {}
        for name in (None, "a", "b", "c"):
            served = base if name is None else self._merged(base, model, name, folder)
            llm = LLM(served, device="cpu", max_model_len=64, num_blocks=20)
            self.due[name] = llm.generate(PROMPT, PARAMS)[0].outputs[0].text
        assert len({*self.due.values()}) == 4
        (folder / "keys").write_text(f"{LINE}\n{OTHER_LINE}\n")
        self.server = Server(
            base, "--adapter", f"a={self.root / 'a'}", "--max-adapters", "2", "--adapter-folder", str(self.root),
            "--api-key-file", str(folder / "keys"),
        )  # fmt: skip
        self.server.client.headers["Authorization"] = f"Bearer {KEY}"

    def _merged(self, base: Path, model: Any, name: str, folder: Path) -> Path:
        path = shutil.copytree(base, folder / f"merged {name}")
        return merged(model, self.added[name], path)

    def text(self, model: str) -> str:
        answer = self.server.complete(**ASKED, model=model)
        assert answer["model"] == model
        return answer["choices"][0]["text"]

    def refused(self, path: str, **fields: Any) -> tuple[int, str]:
        answer = self.server.post(path, **fields)
        return answer.status_code, answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def adapted(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    made = Adapted(folder, tmp_path_factory.mktemp("adapters"))
    with made.server:
        yield made


def test_the_model_s_name_chooses(adapted) -> None:
    server = adapted.server
    assert adapted.text(server.name) == adapted.due[None]
    assert adapted.text("a") == adapted.due["a"]
    base, adapter = server.client.get("/v1/models").json()["data"]
    assert (base["id"], adapter["id"], adapter["parent"]) == (server.name, "a", server.name)
    assert adapter["root"] == str(adapted.root / "a")
    assert server.client.get("/v1/models/a").json() == adapter
    assert adapted.refused("/v1/completions", model="b", prompt="a")[0] == 404
    chat = {"messages": [{"role": "user", "content": "tile"}], "max_tokens": 3}
    for path, fields in (("/v1/messages", chat), ("/v1/responses", {"input": "tile", "max_output_tokens": 16})):
        answer = server.post(path, model="a", **fields)
        assert (answer.status_code, answer.json()["model"]) == (200, "a"), answer.text


def test_clients_load_and_unload(adapted) -> None:
    server = adapted.server
    for _ in range(2):
        answer = server.post("/v1/load_lora_adapter", lora_name="new", lora_path="b")
        assert (answer.status_code, answer.json()) == (200, {"loaded": "new"})
        assert adapted.text("new") == adapted.due["b"]
        assert adapted.refused("/v1/load_lora_adapter", lora_name="new", lora_path="b")[1].startswith(
            "an adapter 'new' is loaded"
        )
        assert adapted.refused("/v1/load_lora_adapter", lora_name="more", lora_path="c")[1].startswith("all 2 slots for adapters")
        answer = server.post("/v1/unload_lora_adapter", lora_name="new")
        assert (answer.status_code, answer.json()) == (200, {"unloaded": "new"})
        assert adapted.refused("/v1/completions", model="new", prompt="a")[0] == 404
        assert adapted.refused("/v1/unload_lora_adapter", lora_name="new") == (404, "there is no adapter 'new'")
    assert adapted.text("a") == adapted.due["a"]


def test_an_adapter_that_comes_and_goes_is_answered_whole_or_refused(adapted) -> None:
    """One name stands for two folders in turn; prompts are equal, so that a prefix of the other would be found."""
    seen, over, texts = Counter[Any](), threading.Event(), {adapted.due["b"], adapted.due["c"]}

    def ask() -> None:
        while not over.is_set():
            answer = adapted.server.post("/v1/completions", **ASKED, model="new")
            assert answer.status_code in (200, 400, 404), answer.text
            seen[answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code] += 1

    def load(path: str) -> None:
        """Loads a folder, or waits: the adapter before it holds its slot until its last answer has ended."""
        answer = adapted.server.post("/v1/load_lora_adapter", lora_name="new", lora_path=path)
        while answer.status_code != 200:
            assert "1 of them by adapters that were unloaded" in answer.text
            assert time.monotonic() < end, seen
            time.sleep(0.01)
            answer = adapted.server.post("/v1/load_lora_adapter", lora_name="new", lora_path=path)

    end = time.monotonic() + 300
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for path in "bc" * 4:
                load(path)
                before = seen[adapted.due[path]]
                while seen[adapted.due[path]] < before + 6:
                    assert time.monotonic() < end, seen
                    assert not any(each.done() for each in asking)
                    time.sleep(0.005)
                assert adapted.server.post("/v1/unload_lora_adapter", lora_name="new").status_code == 200
        finally:
            over.set()
        for each in asking:
            each.result()
    assert {each for each in seen if isinstance(each, str)} == texts
    for path in ("b", "c"):
        assert adapted.server.post("/v1/load_lora_adapter", lora_name="new", lora_path=path).status_code == 200
        assert adapted.text("new") == adapted.due[path]
        assert adapted.server.post("/v1/unload_lora_adapter", lora_name="new").status_code == 200


def test_no_client_reads_another_folder(adapted, folder: Path) -> None:
    os.symlink(folder, adapted.root / "link")
    for path in ("..", "", ".", "/etc", "../keys", "b/../..", str(folder), "link", "\0", "b\0"):
        assert adapted.refused("/v1/load_lora_adapter", lora_name="x", lora_path=path)[0] == 400
        assert "must be below --adapter-folder" in adapted.refused("/v1/load_lora_adapter", lora_name="x", lora_path=path)[1]
    assert adapted.refused("/v1/load_lora_adapter", lora_name="x", lora_path="none")[1].startswith(
        "none is not a folder; give one"
    )
    for name in ("", "a\nb", adapted.server.name):
        assert adapted.refused("/v1/load_lora_adapter", lora_name=name, lora_path="b")[0] == 400
    assert adapted.refused("/v1/load_lora_adapter", lora_name="x" * 999, lora_path="b")[0] == 400
    assert adapted.refused("/v1/load_lora_adapter", lora_name="x", lora_path="b", lora_int_id=3)[0] == 400
    headers = {"Authorization": "Bearer wrong"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert adapted.server.client.post(path, json={"lora_name": "a", "lora_path": "a"}, headers=headers).status_code == 401
    assert adapted.text("a") == adapted.due["a"]
    # keys share no prefixes, and adapters neither
    assert adapted.server.client.get("/v1/models", headers={"Authorization": f"Bearer {OTHER}"}).status_code == 200


def test_a_server_without_a_folder_or_keys_loads_nothing(server) -> None:
    for path, fields in (("load", {"lora_name": "x", "lora_path": "/etc"}), ("unload", {"lora_name": "x"})):
        answer = server.post(f"/v1/{path}_lora_adapter", **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(
            "adapters cannot be loaded or unloaded: the server has no --adapter-f"
        )


def test_settings(folder: Path, tmp_path: Path) -> None:
    keys = Keys(dict([LINE.split(":")]))
    for wrong, sentence in (
        ({"adapter_folder": tmp_path}, "--adapter-folder is given and no key"),
        ({"adapter_folder": tmp_path / "none", "keys": keys}, "which is no folder; make it first"),
        ({"engine": {"adapters": {"tiny": str(tmp_path)}}}, "--adapter has 'tiny', which is the model's name"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            ServerSettings(model=str(folder), **wrong)


def test_an_engine_that_starts_again_has_what_was_loaded(folder: Path, tmp_path: Path) -> None:
    for seed, (name, rank) in enumerate((("a", 40), ("b", 4))):
        write_adapter(tmp_path / name, transformers.AutoModelForCausalLM.from_pretrained(folder), ("q_proj",), rank, seed=seed)
    settings = {"model": "m", "adapters": [f"a={tmp_path / 'a'}"]}
    known = KnownAdapters(settings)
    known.note("b", str(tmp_path / "b"))
    known.note("a", None)
    # the room is what it was at first
    room = {"max_adapters": 1, "max_adapter_rank": 40}
    assert known.for_another_start(settings) == settings | room | {"adapters": {"b": str(tmp_path / "b")}}
    shutil.rmtree(tmp_path / "b")
    assert known.for_another_start(settings) == settings | room | {"adapters": {}}
    assert (known.lacks, known.there) == ({"b"}, [])
    known.note("b", str(tmp_path / "b"))
    assert (known.lacks, known.there) == (set(), ["b"])
    assert KnownAdapters({"model": "m"}).for_another_start({"model": "m"}) == {"model": "m", "adapters": {}}
    # what is wrong with a setting is the engine's to say
    assert KnownAdapters({"adapters": 7}).there == []


def test_two_replicas_have_the_same_adapters(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has died loads them again, as far as their folders are there; the other answers for what it lacks."""
    monkeypatch.setattr(replica, "PAUSES_S", (0.1, 0.1, 0.1))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, model, ("q_proj", "down_proj"), 4, seed=seed)
    llm = LLM(folder, device="cpu", adapters={name: tmp_path / name for name in "abc"}, max_model_len=64, num_blocks=20)
    due = {name: llm.generate(PROMPT, PARAMS, adapter=name)[0].outputs[0].text for name in (None, *"abc")}
    assert len({*due.values()}) == 4

    async def test() -> None:
        engine = {"adapters": {"a": str(tmp_path / "a")}, "max_adapters": 3, "num_blocks": 64, "max_model_len": 64}
        keys, name = Keys(dict([LINE.split(":")])), folder.name
        async with living(folder, replicas=2, engine=engine, adapter_folder=tmp_path, keys=keys, ready=False) as it:
            it.client.headers["Authorization"] = f"Bearer {KEY}"
            await it.ready()
            await both_answer(it)

            async def answers(*names: str | None) -> None:
                """Each is asked often enough that both engines answer it."""
                for each in names * 4:
                    answer = await it.client.post("/v1/completions", json=ASKED | {"model": each or name})
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["choices"][0]["text"] == due[each]

            async def change(path: str, *found: int, **fields: str) -> None:
                answer = await it.client.post(f"/v1/{path}_lora_adapter", json=fields)
                assert answer.status_code in found, answer.text

            async def there() -> list[float]:
                return await series(it, "replica_adapters")

            await change("load", 200, lora_name="b", lora_path="b")
            await change("load", 200, lora_name="c", lora_path="c")
            await answers(None, *"abc")
            assert await there() == [3, 3]
            shutil.rmtree(tmp_path / "c")
            first = it.service.engines.all[0]
            dead = first.engine
            dead.process.kill()
            await until(lambda: dead.cause is not None)
            # not while one does not answer
            await change("unload", 503, lora_name="b")
            await both_answer(it)
            assert await there() == [2, 3]
            assert first.adapters.lacks == {"c"}
            await answers(None, *"abc")
            await change("unload", 200, lora_name="c")
            await change("unload", 200, lora_name="b")
            await change("load", 200, lora_name="c", lora_path="b")
            assert await there() == [2, 2]
            due["c"] = due["b"]
            await answers("a", "c")

            # one dies while it unloads: it is started again without, and the name is free everywhere
            async def dies(adapter: str, path: str | None) -> None:
                raise EngineDown("dead")

            monkeypatch.setattr(first.engine, "change_adapter", dies)
            await change("load", 503, lora_name="b", lora_path="b")
            assert await there() == [2, 2]
            await change("unload", 200, lora_name="c")
            assert await there() == [1, 1]

    asyncio.run(asyncio.wait_for(test(), 300))
