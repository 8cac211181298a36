"""The progress of a run: in the log whatever the console is; the time left goes by the steps of this process, without its start-up."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from sft_play.training import metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(console: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> metrics.Progress:
    """Goes on from step 500 of 1000: a minute of start-up with the first step, then steps of 0.125 s."""
    now = 1000.0
    clock: Callable[[], float] = lambda: now  # noqa: E731
    monkeypatch.setattr(metrics.time, "monotonic", clock)
    monkeypatch.setattr(metrics.time, "time", clock)
    shown = metrics.Progress(console, log)
    state, nothing = TrainerState(global_step=500, max_steps=1000), {"args": None, "control": None}
    logs: dict[str, Any] = {"rank_loss": 1.0, "loss": 1.0, "tokens_per_second": 9.0}
    shown.on_train_begin(state=state, **nothing)
    for step in range(501, 701):
        now += 60 if step == 501 else 0.125
        state.global_step = step
        shown.on_step_end(state=state, **nothing)
        shown.on_log(state=state, logs=logs, **nothing)
    return shown


def test_time_left_after_a_resume_leaves_the_start_out(monkeypatch: pytest.MonkeyPatch) -> None:
    console = io.StringIO()
    train(console, monkeypatch, io.StringIO())
    first, second, *_ = console.getvalue().splitlines()
    assert first == "step 501/1000: loss 1.0000, 9 tokens/s"
    assert second == "step 581/1000: loss 1.0000, 9 tokens/s, 0:52 left"


def test_the_bar_counts_from_the_first_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = train(Terminal(), monkeypatch, io.StringIO()).bar
    assert (bar.initial, bar.start_t) == (501, 1060.0)
    facts = bar.format_dict
    facts["elapsed"] = 199 * 0.125
    assert "<00:37, " in bar.format_meter(**facts)
    bar.close()


@pytest.mark.parametrize("console", [None, io.StringIO(), Terminal()], ids=["none", "pipe", "terminal"])
def test_the_log_has_the_lines_whatever_the_console_is(console: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    shown = train(console, monkeypatch, log)
    shown.on_log(args=None, control=None, state=TrainerState(global_step=700, max_steps=1000), logs={"eval_loss": 0.5})
    lines = log.getvalue().splitlines()
    assert lines[0] == "step 501/1000: loss 1.0000, 9 tokens/s"
    assert lines[-1] == "step 700/1000: held-out loss 0.5000" and len(lines) == len(set(lines))
    if shown.bar is not None:
        shown.bar.close()
        assert console is not None and "step 501/1000" not in console.getvalue(), "the bar says it"
        assert console.getvalue().count(lines[-1]) == 1
    elif console is not None:
        assert console.getvalue().splitlines() == lines


def test_the_log_alone_is_not_on_the_console(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sft_play.training.console import log_alone, redirect\n"
        "console = redirect(Path(sys.argv[1]), 0); print('both'); log = log_alone(); log.write('step 1\\n'); log.flush()"
    )
    log = tmp_path / "rank0.log"
    done = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, timeout=60, check=True)
    assert log.read_text() == "both\nstep 1\n" and done.stdout == "both\n"
