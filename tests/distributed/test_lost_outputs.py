"""A run whose console goes away, and one whose disk fills: real pipes, and a real small disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.runs.folder import RunFolder
from tests.launcher import Launcher

SECONDS = 240


@pytest.fixture
def launcher(tmp_path: Path, tiny: Path) -> Launcher:
    return Launcher(tmp_path, tiny)


def test_a_console_that_is_closed_does_not_end_the_run(launcher: Launcher) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sft_play", "train", f"CONFIG={launcher.config}", "RUN_NAME=unread", "TRAIN_MAX_STEPS=6"],
        env=launcher.environment,
        cwd=launcher.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("run "):
            break
    process.stdout.close()  # as `| head` does; all that the workers say comes after it
    assert process.wait(SECONDS) == 0, "".join(seen)
    run = RunFolder(launcher.runs / "unread")
    assert [event["event"] for event in launcher.events("unread")] == ["started", "finished"]
    assert [json.loads(line)["kind"] for line in run.metrics.read_text().splitlines()].count("train") == 6
    assert "Broken pipe" not in run.rank_log(0).read_text()
