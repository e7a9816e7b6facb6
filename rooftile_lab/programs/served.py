"""A checkpoint with random weights, `rooftile serve` with it in a process, and a client that takes little time itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rooftile.cost.session import Session, open_session
from rooftile_lab.bench.models import MODELS
from rooftile_lab.bench.results import Row

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 900.0


def arguments(about: str | None, *, num_blocks: int) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that all benchmarks of the server take.

    Args:
        about: the help text.
        num_blocks: the usual size of the cache.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="tiny", choices=("tiny", "1b", "8b"))
    parser.add_argument("--num-blocks", type=int, default=num_blocks)
    parser.add_argument("--folder", type=Path, help="keep the checkpoint in this folder, or take it from there")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    return parser


@contextlib.contextmanager
def opened(asked: argparse.Namespace) -> Iterator[tuple[Session, Path]]:
    """Yields the session of a device and the folder of a checkpoint. On a CPU the engine has one thread, here and in a server."""
    device = torch.device(asked.device)
    if device.type == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    session = open_session(device)
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made) / asked.shape
        if not (folder / "config.json").is_file():
            make_checkpoint(folder, asked.shape, device)
        yield session, folder


def show(row: Row, file: Path | None) -> None:
    """Prints a row, and appends it to a file if there is one."""
    line = row.json()
    print(line, flush=True)
    if file is not None:
        with file.open("a") as lines:
            lines.write(line + "\n")


def make_checkpoint(folder: Path, shape: str, device: torch.device) -> Path:
    """Writes a Llama with random weights and a tokenizer whose every token has a text."""
    model = MODELS[shape]
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        max_position_embeddings=min(model.max_len, 16_384), tie_word_embeddings=model.tie, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
        # a small model whose weights are as small says one token for ever
        initializer_range=0.2 if model.hidden < 1024 else 0.02,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            transformers.LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    _tokenizer(model.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer(size: int) -> Tokenizer:
    """Returns a tokenizer of bytes, and of words that texts are decoded to and never encoded to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġ{first}{second}{third}" for first in alphabet[:80] for second in alphabet[:80] for third in alphabet[:80])
    vocabulary = {token: n for n, token in enumerate([*alphabet, *(next(words) for _ in range(size - len(alphabet)))])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def environment() -> dict[str, str]:
    """Returns the environment of a process that imports this checkout, and what this process finds beside it."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths}


class Server:
    """`rooftile serve` with a folder, in a process of its own.

    Args:
        folder: the checkpoint.
        options: words of the command.
        ready: whether to wait until it answers.
    """

    def __init__(self, folder: Path, *options: str, ready: bool = True) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rooftile", "serve", str(folder), "--port", "0", *options],
            cwd=ROOT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment(),
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(self._wait_for(r"listening on http://[^;]*:(\d+);"))
        self.listening_s = time.perf_counter() - began
        if ready:
            self._wait_for("(ready): ")
            self.ready_s = time.perf_counter() - began

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(line)
        self.lines.put("")

    def _wait_for(self, pattern: str) -> str:
        while line := self.lines.get(timeout=PATIENCE_S):
            self.log.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise RuntimeError(f"the server has ended:\n{''.join(self.log)}")

    @property
    def pids(self) -> list[int]:
        """The ids of the server's process and of the engine's."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    @property
    def cpu_s(self) -> dict[str, float]:
        """Seconds that the cores have spent so far on the client, which is this process, on the API, and on the engine."""
        tick = os.sysconf("SC_CLK_TCK")
        spent = {}
        for name, pid in zip(("client", "api", "engine"), (os.getpid(), *self.pids), strict=True):
            # the command's name, in brackets, may hold spaces; user and system time come 12 fields after it
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent[name] = (int(fields[11]) + int(fields[12])) / tick
        return spent

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Reading(asyncio.Protocol):
    """One request on a connection of its own: when its events came, and the end of what was said.

    Args:
        port: the server's.
        body: a JSON object, or bytes to send as they are.
        path: the route.
        gone: the number of events after which the client leaves.
        kept: how many of the last bytes are kept.
    """

    def __init__(self, port: int, body: Any, path: str = "/v1/completions", *, gone: int | None = None, kept: int = 4096) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self._request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        self._port = port
        self._gone = gone
        self._kept = kept
        self.times: list[float] = []
        """The moment of each event that came."""
        self.sent = 0.0
        self.ended = 0.0
        self.status = 0
        self.tail = b""
        """The last bytes of the answer."""
        self.over = asyncio.get_running_loop().create_future()

    async def run(self) -> Reading:
        """Sends the request, and returns at the end of its answer."""
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)
        try:
            await self.over
        finally:
            transport.close()
        return self

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.status:
            self.status = int(data[9:12])
        # the last events are usage, which has no choice, and [DONE]
        count = data.count(b'"index":')
        self.times += [now] * count
        self.tail = (self.tail + data)[-self._kept :]
        if self._gone is not None and len(self.times) >= self._gone:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = time.perf_counter()
        if not self.over.done():
            self.over.set_result(None)

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as the server has counted them."""
        found = re.findall(rb'"completion_tokens":(\d+)', self.tail)
        if not found:
            raise RuntimeError(f"no whole answer: status {self.status}, {self.tail[-300:]!r}")
        return int(found[-1])


async def read_all(port: int, bodies: Sequence[Any]) -> list[Reading]:
    """Sends all requests at once; returns them when all are answered."""
    return await asyncio.gather(*(Reading(port, body).run() for body in bodies))


async def get(port: int, path: str) -> bytes:
    """Returns the body of a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


def stream_of(prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Asks for a stream of exactly `max_tokens` tokens."""
    usual = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return {"prompt": prompt, "max_tokens": max_tokens} | usual | more
