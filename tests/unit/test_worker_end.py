"""The end of a worker's process: what is at work elsewhere in it gets a few seconds, and no more."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

BEGIN = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sft_play.train import end
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
    ("thread", "found", "limit"),
    [
        ("threading.Thread(target=work, args=('sent', 0.5)).start()", {"sent", "exit-functions"}, 2.5),
        ("pool.submit(work, 'sent', 0.5)", {"sent", "exit-functions"}, 2.5),
        ("threading.Thread(target=work, args=('late', 60)).start()", {"exit-functions"}, 8.0),
        ("threading.Thread(target=work, args=('late', 60), daemon=True).start()", {"exit-functions"}, 2.5),
    ],
)
def test_threads_get_some_seconds_and_exit_functions_their_turn(
    tmp_path: Path, thread: str, found: set[str], limit: float
) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"{BEGIN}{thread}\nend(0)", str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "ready").exists() and child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ready = time.monotonic()
        assert child.wait(timeout=60) == 0
        assert time.monotonic() - ready < limit
    finally:
        child.kill()
        child.wait(timeout=10)
    assert {path.name for path in tmp_path.iterdir()} - {"ready"} == found
