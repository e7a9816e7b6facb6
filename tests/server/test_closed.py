"""The server's code: nothing that can run what it reads, and nothing of a server before one is started."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import Server

FOLDER = Path(__file__).resolve().parents[2] / "rooftile" / "server"
FILES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_nothing_can_run_what_it_reads(file) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = {alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {(node.module or "").partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert named.isdisjoint(
        {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jinja2", "requests", "urllib", "zmq", "torch"}
    )
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called.isdisjoint({"eval", "exec", "compile", "__import__"})


def test_a_server_is_imported_when_one_is_started() -> None:
    program = "import sys, rooftile.cli.app, rooftile.engine; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    names = set(done.stdout.split())
    assert "rooftile" in names
    assert names.isdisjoint(
        {"fastapi", "pydantic", "uvicorn", "starlette", "msgspec", "prometheus_client", "llguidance", "httpx"}
    )


def test_the_process_that_answers_has_no_torch(server: Server) -> None:
    """It listens as soon as it has started, and has no memory to spare for a library that it does not use."""
    said = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=2)
    assert said.status_code == 200
    server.complete("The roof", max_tokens=2, logprobs=1, stop="x")
    libraries = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, server.engine.pid)]
    assert ["libtorch" in each for each in libraries] == [False, True]


def test_the_engine_looks_for_its_server_before_it_imports_torch() -> None:
    """Importing takes seconds, in which an engine whose server has been killed would live on."""
    program = "import sys, rooftile.server.engine.process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False"
