"""Headless Chromium, driven over its debugging pipe: what a page shows, how wide it is, and what it complains of."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.programs import need

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run"
    " --disable-background-networking"
)


@dataclass
class Browser:
    """One page of Chromium."""

    to: int
    back: int
    session: str = ""
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, uncaught exceptions, and what the content security policy refused."""
    _number: int = 0
    _rest: bytes = b""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply["error"]
                answer: dict[str, Any] = reply["result"]
                return answer
            self._note(reply)

    def open(self, url: str, *, width: int = 1440, height: int = 900) -> None:
        """Load a page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)[
            "result"
        ].get("value")

    def wait(self, expression: str, seconds: float = 240.0) -> Any:
        """Return the expression's value once it is true; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, (
                f"not within {seconds} s: {expression}; the page: {self.value('document.body.innerText')}"
            )
            time.sleep(0.1)
        return value

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self.back, 2**20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        level = parameters.get("type") or parameters.get("entry", {}).get("level")
        if event.get("method") == "Runtime.exceptionThrown" or level in ("error", "warning"):
            self.complaints.append(json.dumps(parameters))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Run Chromium with its profile in `folder`; skip the test if it is not installed."""
    need("chromium")
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    # Chromium reads commands from descriptor 3 and writes to 4.
    shell = f'exec 3<&{to_read} 4>&{back_write}; exec chromium "$@"'
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            shell,
            "chromium",
            *FLAGS.split(),
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        pass_fds=(to_read, back_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(back_write)
    try:
        page = Browser(to_write, back_read)
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        process.kill()
        process.wait()
        os.close(to_write)
        os.close(back_read)
