"""Trackers (B15): refusals, one that fails or hangs, and real libraries offline where `make test-all` has installed
them.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from sft_play.runs.folder import RunFolder
from sft_play.training.trackers import Tracked
from tests.conftest import Program
from tests.training_runs import Trial, make_run, rows, train

SECRET = "hf_" + "Q7xk2Lm9" * 4


class Recording(TrainerCallback):
    """Keeps what it is given; fails at one step, hangs at another."""

    def __init__(self, fails: int = 0, hangs: int = 0) -> None:
        self.fails, self.hangs, self.seen, self.over = fails, hangs, [], threading.Event()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.fails:
            raise ConnectionError("the server is gone")
        if state.global_step == self.hangs:
            self.over.wait(60)
        self.seen.append((state.global_step, logs))


def drive(inner: Recording, run: RunFolder) -> None:
    tracked = Tracked("mine", lambda: inner, run, end_seconds=0.5 if inner.hangs else 60)
    state = SimpleNamespace(global_step=0)
    tracked.on_train_begin(None, state, None)
    for step in range(1, 6):
        state.global_step = step
        tracked.on_log(None, state, None, logs={"loss": float(step)})
    tracked.on_train_end(None, state, None)


def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for inner, logged, message in (
        (Recording(), 5, ""),
        (Recording(fails=3), 2, "failed: the server is gone"),
        (Recording(hangs=3), 2, "has not accepted everything within"),
    ):
        drive(inner, RunFolder(tmp_path))
        assert inner.seen == [(step, {"loss": float(step)}) for step in range(1, logged + 1)]
        warnings = capsys.readouterr().err.splitlines()
        assert len(warnings) == bool(message) and (not message or message in warnings[0]), warnings
        inner.over.set()


def test_a_tracker_that_is_missing_is_refused_before_the_run(in_process: Program, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    words = ("CONFIG=quickstart", f"DATA_TRAIN_PATH={rows}", "TRAIN_REPORT_TO=trackio", "RUN_NAME=refused")
    in_process("train", *words).refused(3, "names `trackio`, which is not installed here", "pip install")
    assert not (tmp_path / "runs").exists()


OFFLINE = {"wandb": {"WANDB_MODE": "offline"}, "mlflow": {}, "comet_ml": {"COMET_START_ONLINE": "0"}}


@pytest.mark.cold
@pytest.mark.parametrize("name", OFFLINE)
def test_a_resumed_run_continues_in_the_tracker(tiny: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    run = make_run(tmp_path / "one", tiny, Trial(settings=(f"train.report_to: {name}",)))
    variables = OFFLINE[name] | {"HF_TOKEN": SECRET, "WANDB_SILENT": "true"}
    ids = []
    for checkpoint in (None, run.checkpoint(4)):
        done = train(run, checkpoint, **variables)
        assert done.returncode == 0 and "warning: the tracker" not in done.stdout + done.stderr, done.stderr
        ids.append(json.loads((run.path / "trackers.json").read_text()))
    assert ids[0] == ids[1] and len(rows(run)) == 8
    if name == "mlflow":
        [steps] = run.path.glob(f"mlruns/*/{ids[0][name]}/metrics/loss")
        assert [int(line.split()[2]) for line in steps.read_text().splitlines()] == [*range(1, 9), *range(5, 9)]
    else:
        files = [path for path in run.path.rglob("*") if ids[0][name] in path.name]
        assert files, [str(path) for path in run.path.rglob("*")][:50]
    sent = [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not sent
