"""A headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
PATIENCE_S = 240.0


class Browser:
    """One page. `events` has all that the browser has told."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = (
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}",
        )  # fmt: skip
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *flags], pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._count = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            read = self._read(until)
            # events may come behind the answer, in one piece with it
            self.events += [each for each in read if "id" not in each]
            for found in read:
                if found.get("id") == self._count:
                    assert "error" not in found, found
                    return found["result"]
        raise AssertionError(f"no answer to {method}")

    def _read(self, until: float) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return []
        data = os.read(self._in, 1 << 20)
        assert data, "the browser has ended"
        *whole, self._rest = (self._rest + data).split(b"\0")
        return [json.loads(each) for each in whole]

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until an expression in the page is true."""
        until = time.monotonic() + PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.05)

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """Waits for an event of one of these kinds and returns all of them; an event may come after its answer."""
        until = time.monotonic() + PATIENCE_S
        while not (found := [each for each in self.events if each["method"] in methods]):
            assert time.monotonic() < until, f"none of {methods} came"
            self.events += self._read(until)
        return found

    def picture(self, path: Path) -> None:
        """Saves a picture of the page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        try:
            self._process.wait(300)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
