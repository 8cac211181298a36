"""The progress of a run: in the log whatever the console is; the time left goes by the steps of this process, without its start-up."""

from __future__ import annotations

import io
from typing import Any

import pytest
from transformers import TrainerState

from sft_play.training import metrics


def train(
    monkeypatch: pytest.MonkeyPatch, log: io.StringIO, console: io.StringIO | None, *, panel: bool = False
) -> metrics.Progress:
    """Goes on from step 500 of 1000: a minute of start-up with the first step, then steps of 0.125 s."""
    now = 1000.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    shown = metrics.Progress(console, log, panel=panel)
    state, nothing = TrainerState(global_step=500, max_steps=1000), {"args": None, "control": None}
    shown.on_train_begin(state=state, **nothing)
    for step in range(501, 701):
        seconds = 60 if step == 501 else 0.125
        now += seconds
        state.global_step = step
        logs: dict[str, Any] = {"rank_loss": 1.0, "loss": 1.0, "tokens_per_second": 9.0, "step_seconds": seconds}
        shown.on_log(state=state, logs=logs, **nothing)
    return shown


def test_time_left_after_a_resume_leaves_the_start_out(monkeypatch: pytest.MonkeyPatch) -> None:
    console = io.StringIO()
    train(monkeypatch, io.StringIO(), console)
    first, second, *_ = console.getvalue().splitlines()
    assert first == "step 501/1000: loss 1.0000, 9 tokens/s"
    assert second == "step 581/1000: loss 1.0000, 9 tokens/s, 0:52 left"


@pytest.mark.parametrize(("console", "panel"), [(None, False), (io.StringIO(), False), (io.StringIO(), True)])
def test_the_log_has_the_lines_whatever_the_console_is(
    console: io.StringIO | None, panel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = io.StringIO()
    shown = train(monkeypatch, log, console, panel=panel)
    shown.on_log(args=None, control=None, state=TrainerState(global_step=700, max_steps=1000), logs={"eval_loss": 0.5})
    lines = log.getvalue().splitlines()
    assert lines[0] == "step 501/1000: loss 1.0000, 9 tokens/s"
    assert lines[-1] == "step 700/1000: held-out loss 0.5000" and len(lines) == len(set(lines))
    if console is not None:
        assert console.getvalue().splitlines() == (lines[-1:] if panel else lines)
