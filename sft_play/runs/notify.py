"""`launch.notify`: a webhook or a command that learns how a run ends, and what happened to it on the way. Never delays or ends a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.client import HTTPException

from sft_play.errors import without_tokens
from sft_play.files import read_object
from sft_play.runs.folder import RunFolder

SECONDS = 5.0
"""What a webhook or a command may take."""
LONGEST = 2000
"""Letters of a text: what chat services take."""
VARIABLE = re.compile(r"\$(\w+)")
WEBHOOK = re.compile(r"https?://\S+")

_under_way = list[threading.Thread]()


def notify(target: str | None, run: RunFolder, event: str, text: str) -> None:
    """Sends `{"run", "event", "text", "content"}` in a thread: to a URL as JSON, to the command of a variable `$NAME` on its stdin.

    `text` is what Slack shows and `content` what Discord does. Tokens are masked.
    """
    if not target:
        return
    text = without_tokens(text)[:LONGEST]
    body = json.dumps({"run": run.name, "event": event, "text": text, "content": text})
    thread = threading.Thread(target=_send, args=(target, body), name="notify", daemon=True)
    thread.start()
    _under_way.append(thread)


def wait_until_sent() -> None:
    """Returns when all is sent or given up, soon after `SECONDS`."""
    until = time.monotonic() + SECONDS + 1
    while _under_way:
        thread = _under_way.pop()
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():  # an answer that comes byte by byte
            _not_sent(f"no answer within {SECONDS + 1:.0f} s")


def end_text(run: RunFolder, event: str, message: str) -> str:
    """Returns how a run ended, in a line or two."""
    said = f"{run.name} {event}"
    if event == "finished":
        facts = read_object(run.training_metrics)
        names = {"steps": "steps", "final_loss": "loss", "eval_loss": "held-out loss", "eval_rougeL": "ROUGE-L"}
        parts = [f"{label} {facts[name]:.4g}" for name, label in names.items() if isinstance(facts.get(name), int | float)]
        return f"{said}: {', '.join(parts)}" if parts else said
    return f"{said}: {message}" if message else said


def _send(target: str, body: str) -> None:
    try:
        found = VARIABLE.fullmatch(target)
        target = os.environ[found[1]] if found else target
        if WEBHOOK.fullmatch(target):
            request = urllib.request.Request(
                target, body.encode(), {"Content-Type": "application/json", "User-Agent": "sft-play"}
            )
            urllib.request.urlopen(request, timeout=SECONDS).close()
        elif found:  # what a run's folder says is never run
            _run(target, body)
        else:
            raise ValueError
    except (
        OSError,
        ValueError,
        KeyError,
        HTTPException,
        subprocess.SubprocessError,
    ) as problem:  # the address, perhaps a secret, is not shown
        code = getattr(problem, "code", None) or getattr(problem, "returncode", None)
        why = code or getattr(getattr(problem, "reason", None), "strerror", None)
        silent = isinstance(problem, TimeoutError | subprocess.TimeoutExpired)
        _not_sent(f"no answer within {SECONDS:g} s" if silent else f"{type(problem).__name__}{f' {why}' if why else ''}")


def _not_sent(why: str) -> None:
    print(f"warning: `launch.notify` was not sent: {why}", file=sys.stderr, flush=True)


def _run(command: str, body: str) -> None:
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, text=True, start_new_session=True
    ) as process:
        try:
            process.communicate(body, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
