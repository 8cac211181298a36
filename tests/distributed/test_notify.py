"""`launch.notify`: a real webhook and a real command learn what happens to a run; one that hangs or fails changes
nothing.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder
from sft_play.runs.progress import notify, wait_until_sent
from tests.conftest import Program
from tests.launcher import Launcher
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.broad

SECRET = "hf_" + "Q7xk2Lm9" * 4


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    messages: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # whoever follows a redirect asks so
            messages.append({"followed": self.path})
            self.send_response(204)
            self.end_headers()

        def do_POST(self) -> None:
            if "away" in self.path or "here" in self.path:
                host = "localhost" if "away" in self.path else "127.0.0.1"
                self.send_response(302)
                self.send_header("Location", f"http://{host}:{self.server.server_address[1]}/elsewhere")
                self.end_headers()
                return
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            for _ in range(100 if "drips" in self.path else 0):  # each byte in time, and never all of them
                self.wfile.write(b"H")
                time.sleep(0.3)
            self.send_response(404 if "missing" in self.path else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing to stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook", messages
        finally:
            server.shutdown()


def test_a_webhook_is_notified_of_a_restart_and_the_end(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, build_tiny_llama(tmp_path / "model"))
    words = ("NUM_GPUS=2", "TRAIN_MAX_STEPS=40", "LAUNCH_MAX_RESTARTS=1", "LAUNCH_NOTIFY=$MY_HOOK_NOTIFY")
    with webhook() as (url, messages):
        launch = launcher.start(
            "train-distributed",
            f"CONFIG={launcher.config}",
            *words,
            name="told",
            MY_HOOK_NOTIFY=url,
            HF_TOKEN=SECRET,
        )
        launch.wait_for_step(3)
        launch.workers()[1].kill()
        code, printed = launch.end()
        assert code == 0, printed
    assert [message["event"] for message in messages] == ["restarted", "finished"]
    texts = {message["event"]: message["text"] for message in messages}
    assert "SIGKILL" in texts["restarted"]
    assert texts["finished"].startswith("told finished: steps 40, loss ")
    assert all(message["run"] == "told" and message["content"] == message["text"] for message in messages)
    assert SECRET not in json.dumps(messages) and url not in printed + (launch.run / "config.json").read_text()


def test_a_command_is_notified_of_a_failure_and_a_stopped_run(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, build_tiny_llama(tmp_path / "model"))
    notes = tmp_path / "notes"
    words = (f"CONFIG={launcher.config}", "TRAIN_MAX_STEPS=2000", "LAUNCH_NOTIFY=$MY_NOTIFY")
    launcher.environment["MY_NOTIFY"] = f"cat >> {notes}; echo >> {notes}"
    launch = launcher.start("train-distributed", "NUM_GPUS=2", *words, name="fails")
    launch.wait_for_step(3)
    launch.workers()[1].kill()
    launch.lost()
    launch = launcher.start("train", *words, name="stops")
    launch.wait_for_step(3)
    assert launcher("stop", "RUN=stops").code == 0
    launch.end(within=240)
    first, second = (json.loads(line) for line in notes.read_text().split("\n") if line)
    assert first["event"] == "failed" and re.search(r"rank 1 \(.+\) was killed by SIGKILL", first["text"])
    assert (second["event"], second["run"]) == ("stopped", "stops")


@pytest.mark.parametrize("target", ["drips", "missing", "sleep 60", "exit 3", ""])
def test_a_receiver_that_does_not_answer_causes_one_warning(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook() as (url, _):
        address = f"{url}/{target}" if target in ("drips", "missing") else "$MY_NOTIFY"
        monkeypatch.setenv("MY_NOTIFY", target) if target else monkeypatch.delenv("MY_NOTIFY", raising=False)
        notify(address, RunFolder(tmp_path / "run"), "finished", f"done {SECRET}")
        wait_until_sent()
    warning = capsys.readouterr().err
    assert (
        warning.startswith("warning: `launch.notify` was not sent: ")
        and warning.count("\n") == 1
        and url not in warning
    )


def test_a_redirect_is_followed_on_the_same_host_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with webhook() as (url, messages):
        for path, followed in (("here", True), ("away", False)):
            notify(f"{url}/{path}", RunFolder(tmp_path / "run"), "finished", "done")
            wait_until_sent()
            assert (messages == [{"followed": "/elsewhere"}]) is followed
            assert ("was not sent" in capsys.readouterr().err) is not followed
            messages.clear()


@pytest.mark.parametrize("target", ["ftp://host/x", "rm -rf /", "$(id)"])
def test_a_command_in_a_configuration_is_refused(target: str, in_process: Program) -> None:
    in_process("config", "CONFIG=quickstart", f"LAUNCH_NOTIFY={target}").refused(
        2, "neither a URL nor the name of a variable with `NOTIFY` in it", "export MY_NOTIFY"
    )


def test_a_command_in_a_runs_own_configuration_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notify(f"touch {tmp_path / 'run-by-notify'}", RunFolder(tmp_path / "run"), "finished", "done")
    wait_until_sent()
    assert "was not sent" in capsys.readouterr().err and not (tmp_path / "run-by-notify").exists()
