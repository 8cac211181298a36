"""The process that builds models without weights (acts: runs `python -m sft_play.trace`), since the plan must not import torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

TRACE_SECONDS = 300
"""A trace takes seconds; one that takes minutes hangs."""
PACKAGES = ("torch", "transformers", "peft", "accelerate")


class Tracer:
    """One `python -m sft_play.trace`, started when it is first asked and ended by `close`: importing torch takes its seconds once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`, as the process is

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the result of each request (a case, or `{"count": architecture}`), `{"error": "..."}` where there is none."""
        if self._process is None:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sft_play.trace"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
                env=environment,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(requests).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], TRACE_SECONDS)
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            return [{"error": f"the trace {self._failure(process)}"}] * len(requests)
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def _failure(self, process: subprocess.Popen[bytes]) -> str:
        """Returns how the process failed, with the last line that it or a library wrote to stderr."""
        try:
            code = process.wait(timeout=5)  # its output closes a moment before it ends
        except subprocess.TimeoutExpired:
            return f"took longer than {TRACE_SECONDS} s"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"ended with code {code}" + (f": {lines[-1].strip()[:300]}" if lines else "")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            self._process = None
        self._said.close()


@cache
def versions() -> str:
    """Returns the versions of the packages that decide what a step allocates."""
    from importlib.metadata import version

    return " ".join(f"{name}=={version(name)}" for name in PACKAGES)
