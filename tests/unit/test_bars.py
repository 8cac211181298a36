"""Progress of long work: the bars of several threads on one terminal, lines elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PROGRAM = """
import time
from sft_play.text import bar
with bar("to node2", "MiB") as first:
    first(1, 10)
    with bar("to node3", "MiB") as second:
        second(20, 40)
        time.sleep(0.5)
        print("a word of node3")
    first(5, 10)
    time.sleep(0.5)
with bar("answers", "rows") as third:
    third(7, None)
    time.sleep(0.5)
"""


def test_bars_of_two_transfers_stand_below_each_other(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while got := os.read(ours, 4096):
            shown += got
    except OSError:  # the terminal's other end is closed
        pass
    assert process.wait(timeout=20) == 0
    text = shown.decode()
    both = [screen for screen in text.split("\x1b[2K") if "20 of 40 MiB" in screen]
    assert both
    assert "1 of 10 MiB" in text
    assert "5 of 10 MiB" in text
    assert "a word of node3" in text
    assert text.index("5 of 10 MiB") < text.index("7 rows")
