"""A run has one launcher at a time, and one that is ended while it prepares leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sft_play.errors import UserError
from sft_play.launch.run_folder import held
from sft_play.runs.folder import RunFolder
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.slow


def test_two_launchers_cannot_have_one_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with held(run):
        with pytest.raises(UserError, match="is in use: process"), held(run):
            pass
        with held(run, node_rank=1):  # another machine that shares the folder
            pass
    with held(run):
        pass


def test_a_signal_during_preparation_leaves_no_run_and_no_process(tmp_path: Path, tiny: Path) -> None:
    variables = environment(tmp_path / "cache", tmp_path / "runs")
    words = [
        f"MODEL_NAME={tiny}",
        "MODEL_MAX_SEQ_LEN=64",
        f"DATA_TRAIN_PATH={ROOT}/examples/02_your_jsonl/train.jsonl",
    ]
    command = [sys.executable, "-m", "sft_play", "train", "CONFIG=configs/quickstart.yaml", "RUN_NAME=cut", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert not (tmp_path / "runs" / "cut").exists()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    if process.stderr:
        process.stderr.close()
