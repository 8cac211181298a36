"""The progress line: the time left goes by the steps of this process, without its start-up."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from transformers import TrainerState

from sft_play.training import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(console: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> progress.Progress:
    """Goes on from step 500 of 1000: a minute of start-up with the first step, then steps of 0.125 s."""
    now = 1000.0
    clock: Callable[[], float] = lambda: now  # noqa: E731
    monkeypatch.setattr(progress.time, "monotonic", clock)
    monkeypatch.setattr(progress.time, "time", clock)
    shown = progress.Progress(console)
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
    train(console, monkeypatch)
    first, second, *_ = console.getvalue().splitlines()
    assert first == "step 501/1000: loss 1.0000, 9 tokens/s"
    assert second == "step 581/1000: loss 1.0000, 9 tokens/s, 0:52 left"


def test_the_bar_counts_from_the_first_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = train(Terminal(), monkeypatch).bar
    assert (bar.initial, bar.start_t) == (501, 1060.0)
    facts = bar.format_dict
    facts["elapsed"] = 199 * 0.125
    assert "<00:37, " in bar.format_meter(**facts)
    bar.close()
