"""What it costs to measure, gather and write the figures of a logged step: processor time beside that of the steps themselves."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_play.runs.folder import RunFolder
from sft_play.training.metrics import MetricsFile
from sft_play.training.readings import PHASES, Lap, Readings, Stopwatch, as_logs
from sft_play.training.trackers import Curves

STEPS, WIDTH, ROWS = 24, 2048, 1024
RANKS = 8


@pytest.mark.long
@pytest.mark.quiet
def test_figures_of_eight_ranks_cost_under_a_hundredth_of_a_step(tmp_path: Path) -> None:
    run, state = RunFolder(tmp_path), SimpleNamespace(global_step=0, is_world_process_zero=True)
    run.config.write_text("{}")
    metrics, curves, watch, readings = MetricsFile(run.metrics), Curves(run), Stopwatch(torch.device("cpu")), Readings()
    lap = Lap(watch)
    for one in (metrics, curves):
        one.on_train_begin(None, state, None)
    layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    rows = torch.randn(ROWS, WIDTH)
    steps, costs = [], []
    for state.global_step in range(1, STEPS + 1):
        watched = 0.0
        begun = time.process_time()
        for call in (
            lambda: watch.enter("data"),
            lambda: watch.enter("communication"),
            lambda: watch.begin({"rows": [1], "input_ids": rows}),
        ):
            call()
        watched += time.process_time() - begun
        loss = layers(rows).pow(2).mean()
        at = time.process_time()
        watch.passed(loss)
        watched += time.process_time() - at
        loss.backward()
        at = time.process_time()
        watch.enter("optimizer")
        found = lap.take()
        table = [[found[phase] for phase in PHASES] + readings.read() for _ in range(1)] * RANKS
        logs: dict[str, Any] = {"loss": 1.0, "rank_loss": [1.0] * RANKS, "tokens_per_second": 1.0} | {
            f"rank_{phase}_seconds": [row[place] for row in table] for place, phase in enumerate(PHASES)
        }
        logs |= as_logs([row[len(PHASES) :] for row in table])
        for one in (metrics, curves):
            one.on_log(None, state, None, logs=logs)
        ended = time.process_time()
        costs.append(watched + ended - at)
        steps.append(ended - begun - costs[-1])
    share = median(costs) / median(steps)
    print(f"{1000 * median(costs):.2f} ms of processor time for each logged step of {1000 * median(steps):.0f} ms: {share:.2%}")
    assert share < 0.01
