"""The messages of a run that stops, and what the same command or a resume then does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.call import Call
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import UserError
from sft_play.launch.process import signals_to_hear
from sft_play.launch.resume import is_longer, refuse_fewer_steps, steps_asked, with_its_batch
from sft_play.launch.verdict import stop_facts
from sft_play.runs.folder import RunFolder
from sft_play.runs.stamp import CHANGEABLE
from tests.conftest import ROOT
from tests.plans import simple_plan


def test_nohup_is_respected() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        for action, heard in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, action)
            assert (signal.SIGHUP in signals_to_hear()) is heard and signal.SIGUSR1 in signals_to_hear()
    finally:
        signal.signal(signal.SIGHUP, before)


STOPPED: dict[str, Any] = {
    "code": 143,
    "time": 1.0,
    "stop": {"signal": "SIGTERM", "step": 7},
}


@pytest.mark.parametrize(("longest_step", "finished"), [(0.0, False), (6.0, True)])
def test_a_stop_waits_for_a_step_as_long_as_earlier_ones(longest_step: float, finished: bool, tmp_path: Path) -> None:
    program = f"""
import signal, sys, time
from pathlib import Path
from sft_play.runs.folder import RunFolder
from sft_play.training.process import Activity
from sft_play.training.stop_request import StopRequest

activity = Activity(phase="training", step=2, longest_step={longest_step})
request = StopRequest(run=RunFolder(Path("run")), rank=0, activity=activity, nothing_to_save=False)
request.hear(signal.SIGTERM)
time.sleep(4)
print("the step has ended")
"""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    environment = {**os.environ, "SFT_PLAY_TIME_SCALE": "0.05", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ("the step has ended" in done.stdout) is finished and (done.returncode == 0) is finished, done.stderr
    assert ("no step ended within 1 s" in done.stderr) is not finished


def test_a_stop_reads_no_large_checkpoint(tmp_path: Path) -> None:
    """A file of 64 GB that holds nothing: to read it would take longer than a scheduler waits. The kernel counts what
    is read.
    """

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    run = RunFolder(tmp_path)
    run.checkpoint(8).mkdir(parents=True)
    (run.checkpoint(8) / "weights").touch()
    os.truncate(run.checkpoint(8) / "weights", 64 * 10**9)
    manifest = {"files": {"weights": {"bytes": 64 * 10**9, "xxh3_128": "0" * 32}}}
    (run.checkpoint(8) / "manifest.json").write_text(json.dumps(manifest))
    before = read()
    assert stop_facts(run, (signal.SIGTERM,), [STOPPED])["saved"] == "step-000008" and read() - before < 10**6


def loaded(folder: Path, train: str, typed: tuple[Override, ...] = ()) -> LoadedConfig:
    path = folder / "one.yaml"
    path.write_text(f"model: {{name: x/y}}\ndata: {{train_path: rows.jsonl}}\ntrain: {{{train}}}\n")
    return load_config(path, typed)


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
def test_a_complete_run_continues_only_with_more_steps(tmp_path: Path, train: str, asked: int, longer: bool) -> None:
    config, plan = loaded(tmp_path, train).config, simple_plan(steps=10, steps_per_epoch=3)
    assert (steps_asked(config, plan), is_longer(config, plan)) == (asked, longer)


def test_fewer_steps_than_already_made_are_refused(tmp_path: Path) -> None:
    config, plan = loaded(tmp_path, "max_steps: 3").config, simple_plan(steps=10, steps_per_epoch=3)
    refuse_fewer_steps(config, plan, tmp_path / "step-000003")
    with pytest.raises(UserError, match="the configuration asks for 3 steps in all, but `step-000008` has made 8"):
        refuse_fewer_steps(config, plan, tmp_path / "step-000008")


@pytest.mark.parametrize(
    ("train", "typed", "world", "expected"),
    [
        ("batch_size: 2, grad_accum: 2", None, 2, (2, 2, "auto")),
        ("batch_size: 2, grad_accum: 2", None, 3, (2, "auto", 8)),
        ("batch_size: 2, grad_accum: 2", "1", 2, (1, "auto", 8)),
        ("batch_size: 4, global_batch_size: 8", None, 4, ("auto", "auto", 8)),
    ],
)
def test_the_global_batch_stays(
    train: str, typed: str | None, world: int, expected: tuple[object, ...], tmp_path: Path
) -> None:
    overrides = (Override(key="train.batch_size", text=typed, origin="make"),) if typed else ()
    before = loaded(tmp_path, train, overrides)
    call = Call(command="resume", overrides=overrides)
    after, note = with_its_batch(before, call, simple_plan(global_batch_size=8), world)
    old, new = before.config.train, after.config.train
    assert (new.batch_size, new.grad_accum, new.global_batch_size) == expected
    if (new.batch_size, new.grad_accum) == (old.batch_size, old.grad_accum):
        assert not note
    else:
        assert note and "stays 8 rows" in note and "is computed again" in note


def test_the_documentation_lists_the_keys_that_a_resume_may_change() -> None:
    section = (ROOT / "docs" / "launching.md").read_text().partition("## Resuming\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`((?:train|eval|launch)\.\w+)`", section)) == CHANGEABLE
