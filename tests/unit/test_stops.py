"""Requests to stop, their pure parts, and a worker's way of hearing them (a bare process, no training)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import UserError
from sft_play.launch.resume import changes, is_longer, refuse_fewer_steps, steps_asked
from sft_play.launch.run_folder import read_events
from sft_play.launch.verdict import record_stop, stop_facts
from sft_play.runs.folder import RunFolder
from sft_play.runs.stamp import CHANGEABLE
from tests.conftest import ROOT
from tests.plans import simple_plan

WORKER = """
import sys, time
from pathlib import Path
from sft_play.runs.folder import RunFolder
from sft_play.training import process
process.PATIENCE_SECONDS, process.AFTER_SAVE_SECONDS = 1.5, 0.5
doing = process.Activity()
request = process.StopRequest(run=RunFolder(Path(sys.argv[1])), rank=0, activity=doing)
request.listen()
{body}
"""
UNSAVED = "request.step = 4; doing.enter('training', step=5); print('ready', flush=True); time.sleep(60)"


def start(folder: Path, body: str) -> tuple[subprocess.Popen[str], str]:
    """Starts a worker; returns it with what it said when it was ready."""
    (folder / "logs").mkdir()
    program = WORKER.format(body=textwrap.dedent(body))
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline()


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "logs" / "exit-rank0.json").read_text())
    return found


def test_what_is_lost_without_checkpoints_is_said(tmp_path: Path) -> None:
    process, _ = start(tmp_path, UNSAVED)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert record(tmp_path)["note"] == "`train.save_strategy` is `no`, so nothing of this run is kept; step 4 had ended"


def test_nohup_is_obeyed() -> None:
    program = (
        "import signal, sys\nfrom sft_play.launch.process import signals_to_hear\nprint([n.name for n in signals_to_hear()])"
    )
    said = {}
    for before in (f"signal.signal(signal.SIGHUP, signal.{action})\n" for action in ("SIG_DFL", "SIG_IGN")):
        words = [sys.executable, "-c", f"import signal\n{before}{program}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        said[before] = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=True).stdout
    assert ["SIGHUP" in text for text in said.values()] == [True, False] and all("SIGUSR1" in text for text in said.values())


STOPPED: dict[str, Any] = {"code": 143, "time": 1.0, "stop": {"signal": "SIGTERM", "phase": "training", "step": 7, "saved": 7}}


def test_a_stop_reads_no_large_checkpoint(tmp_path: Path) -> None:
    """A file of 64 GB that holds nothing: to read it would take longer than a scheduler waits."""
    run = RunFolder(tmp_path)
    run.checkpoint(8).mkdir(parents=True)
    (run.checkpoint(8) / "weights").touch()
    os.truncate(run.checkpoint(8) / "weights", 64 * 10**9)
    manifest = {"files": {"weights": {"bytes": 64 * 10**9, "xxh3_128": "0" * 32}}}
    (run.checkpoint(8) / "manifest.json").write_text(json.dumps(manifest))
    began = time.process_time()
    assert stop_facts(run, (signal.SIGTERM,), [STOPPED])["saved"] == "step-000008" and time.process_time() - began < 5


@pytest.mark.parametrize(("stop", "code", "name"), [(SystemExit(143), 143, "SIGTERM"), (KeyboardInterrupt(), 130, "SIGINT")])
def test_a_stop_while_no_worker_lives_is_recorded(tmp_path: Path, stop: BaseException, code: int, name: str) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(type(stop)), record_stop(run, 1):
        raise stop
    (event,) = read_events(run)
    assert (event["event"], event["code"], event["signal"], event["node"], event["saved"]) == ("stopped", code, name, 1, None)
    with pytest.raises(type(stop)), record_stop(RunFolder(tmp_path / "gone"), 0):  # where nothing can be written
        raise stop


def loaded(folder: Path, train: str) -> LoadedConfig:
    path = folder / "one.yaml"
    path.write_text(f"model: {{name: x/y}}\ndata: {{train_path: rows.jsonl}}\ntrain: {{{train}}}\n")
    return load_config(path)


def test_keys_that_changed_are_found_with_their_place(tmp_path: Path) -> None:
    old = loaded(tmp_path, "max_steps: 5, logging_first_step: true")
    assert changes(old, loaded(tmp_path, "max_steps: 5, logging_first_step: true")) == []
    found = changes(old, loaded(tmp_path, "max_steps: 9, weight_decay: 0.1, logging_first_step: false"))
    assert {(one.key, one.text) for one in found} == {
        ("train.max_steps", "9"), ("train.weight_decay", "0.1"), ("train.logging_first_step", "false")
    }  # fmt: skip
    assert all("one.yaml" in one.origin for one in found)


@pytest.mark.parametrize(
    ("train", "asked", "longer"),
    [
        ("max_steps: 6", 6, False),
        ("max_steps: 10", 10, False),
        ("max_steps: 11", 11, True),
        ("max_steps: 6, epochs: 99", 6, False),
        ("epochs: 2.5", 8, False),
        ("epochs: 4", 12, True),
    ],
)
def test_a_complete_run_goes_on_only_where_more_steps_are_asked_for(tmp_path: Path, train: str, asked: int, longer: bool) -> None:
    config, plan = loaded(tmp_path, train).config, simple_plan(steps=10, steps_per_epoch=3)
    assert (steps_asked(config, plan), is_longer(config, plan)) == (asked, longer)


def test_fewer_steps_than_were_made_are_refused(tmp_path: Path) -> None:
    config, plan = loaded(tmp_path, "max_steps: 3").config, simple_plan(steps=10, steps_per_epoch=3)
    refuse_fewer_steps(config, plan, tmp_path / "step-000003")
    with pytest.raises(UserError, match="3 steps in all are asked for, and `step-000008` has made 8"):
        refuse_fewer_steps(config, plan, tmp_path / "step-000008")


def test_the_documentation_lists_the_keys_that_a_resume_may_change() -> None:
    section = (ROOT / "docs" / "launching.md").read_text().partition("## Resuming\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`((?:train|eval|launch)\.\w+)`", section)) == CHANGEABLE
