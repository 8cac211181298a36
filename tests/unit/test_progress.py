"""A worker's end: what its threads may still finish."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
