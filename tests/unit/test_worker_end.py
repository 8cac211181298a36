"""The end of a worker's process: what is at work elsewhere in it gets a few seconds, and no more."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.launch.liveness import MARK
from sft_play.runs.folder import RunFolder
from sft_play.training.faults import say, verdict
from sft_play.training.process import Activity, Tee
from tests.conftest import ROOT
from tests.waiting import until

BEGIN = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sft_play.training.faults import end
folder = Path(sys.argv[1])
def work(name, seconds):
    time.sleep(seconds)
    (folder / name).touch()
atexit.register(lambda: (folder / "exit-functions").touch())
pool = ThreadPoolExecutor(1)
pool.submit(int)
(folder / "ready").touch()
"""


@pytest.mark.parametrize(
    ("thread", "found"),
    [
        ("threading.Thread(target=work, args=('sent', 0.5)).start()", {"sent", "exit-functions"}),
        ("pool.submit(work, 'sent', 0.5)", {"sent", "exit-functions"}),
        ("threading.Thread(target=work, args=('late', 600)).start()", {"exit-functions"}),
        ("threading.Thread(target=work, args=('late', 600), daemon=True).start()", {"exit-functions"}),
    ],
)
def test_threads_get_some_seconds_and_exit_functions_their_turn(tmp_path: Path, thread: str, found: set[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"{BEGIN}{thread}\nend(0)", str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: (tmp_path / "ready").exists() or child.poll() is not None, seconds=120)
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait(timeout=10)
    assert {path.name for path in tmp_path.iterdir()} - {"ready"} == found


GLOO = "Read error [127.0.0.1]:21718: Connection reset by peer. Check the logs of the remote worker. GLHF!"


@pytest.mark.parametrize(("told", "error", "shown"), [(True, GLOO, False), (True, "a bug of ours", True), (False, GLOO, True)])
def test_that_a_peer_has_gone_is_for_the_log_where_a_launcher_says_which_rank_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool, error: str, shown: bool
) -> None:
    monkeypatch.delenv(MARK, raising=False)
    if told:
        monkeypatch.setenv(MARK, "launch")
    console, problem = io.StringIO(), RuntimeError(error)
    with (tmp_path / "rank0.log").open("a", encoding="utf-8") as log:
        monkeypatch.setattr(sys, "stderr", Tee(log, console))
        say(problem, verdict(problem, RunFolder(tmp_path), Activity()))
        monkeypatch.undo()
    assert (error in console.getvalue()) is shown
    assert (tmp_path / "rank0.log").read_text().count(f"RuntimeError: {error}") == 1
